// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "ortrain/base/error.h"
#include "ortrain/base/half.h"
#include "ortrain/ir/expr_program.h"

// What the scalar operations of expression programs mean, for one element. Integers wrap around;
// nothing here is undefined except where it throws.
namespace ortrain::expr {

template <typename T>
inline constexpr bool kIsFloat = std::is_floating_point_v<T>;

template <typename T>
using Unsigned = typename std::conditional_t<std::is_integral_v<T> && !std::is_same_v<T, bool>,
                                             std::make_unsigned<T>, std::type_identity<T>>::type;

[[noreturn]] inline void throw_division_by_zero() {
  throw UnsupportedError("integer division by zero");
}

// --- casts

// Truncates; NaN and what does not fit in 64 bits become the lowest integer, and narrower types
// keep the low bits, as x86 processors do.
template <typename To, typename From>
To float_to_integer(From value) {
  if constexpr (std::is_same_v<To, int32_t>) {
    return value > From{-2147483904.0} && value < From{2147483648.0}
               ? static_cast<int32_t>(value < From{-2147483648.0} ? From{-2147483648.0} : value)
               : std::numeric_limits<int32_t>::min();
  } else {
    if constexpr (std::is_same_v<To, uint64_t>) {
      if (value >= From{9223372036854775808.0} && value < From{18446744073709551616.0}) {
        return static_cast<uint64_t>(value);
      }
    }
    const int64_t wide =
        value >= From{-9223372036854775808.0} && value < From{9223372036854775808.0}
            ? static_cast<int64_t>(value)
            : std::numeric_limits<int64_t>::min();
    return static_cast<To>(wide);
  }
}

template <typename To, typename From>
To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<To, bool>) {
    return value != From{0};
  } else if constexpr (kIsFloat<From> && !kIsFloat<To>) {
    return float_to_integer<To>(value);
  } else {
    return static_cast<To>(value);
  }
}

// --- one operand

template <typename T>
T neg(T x) {
  if constexpr (kIsFloat<T>) return -x;
  return static_cast<T>(Unsigned<T>{0} - static_cast<Unsigned<T>>(x));
}

template <typename T>
T abs(T x) {
  if constexpr (kIsFloat<T>) return std::fabs(x);
  return x < T{0} ? neg(x) : x;
}

template <typename T>
T sign(T x) {
  if (x > T{0}) return T{1};
  if (x < T{0}) return static_cast<T>(-1);
  return x;  // zero or NaN
}

template <typename T>
T relu(T x) {
  return x < T{0} ? T{0} : x;
}

template <typename T>
T sigmoid(T x) {
  const T e = std::exp(-std::fabs(x));
  return (x < T{0} ? e : T{1}) / (T{1} + e);
}

template <typename T>
T rsqrt(T x) {
  return T{1} / std::sqrt(x);
}

// --- two operands

template <typename T>
T add(T a, T b) {
  if constexpr (kIsFloat<T>) return a + b;
  return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
}

template <typename T>
T sub(T a, T b) {
  if constexpr (kIsFloat<T>) return a - b;
  return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
}

template <typename T>
T mul(T a, T b) {
  if constexpr (kIsFloat<T>) return a * b;
  // 64 bits: the product of two uint16_t would overflow a signed int.
  return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}

// Integers: towards zero.
template <typename T>
T div(T a, T b) {
  if constexpr (kIsFloat<T>) return a / b;
  if (b == T{0}) throw_division_by_zero();
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return neg(a);
  return static_cast<T>(a / b);
}

// The remainder has the sign of the dividend.
template <typename T>
T fmod(T a, T b) {
  if constexpr (kIsFloat<T>) {
    return std::fmod(a, b);
  } else {
    if (b == T{0}) throw_division_by_zero();
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return T{0};
    return static_cast<T>(a % b);
  }
}

// The remainder has the sign of the divisor.
template <typename T>
T mod(T a, T b) {
  const T remainder = fmod(a, b);
  if (remainder != T{0} && (remainder < T{0}) != (b < T{0})) return static_cast<T>(remainder + b);
  return remainder;
}

// Rounds the quotient down; floats as Python's // does.
template <typename T>
T floor_div(T a, T b) {
  if constexpr (kIsFloat<T>) {
    if (b == T{0}) return a / b;
    const T remainder = std::fmod(a, b);
    T quotient = (a - remainder) / b;
    if (remainder != T{0} && (remainder < T{0}) != (b < T{0})) quotient -= T{1};
    if (quotient == T{0}) return std::copysign(T{0}, a / b);
    const T floored = std::floor(quotient);
    return quotient - floored > T{0.5} ? floored + T{1} : floored;
  } else {
    const T quotient = div(a, b);
    const bool inexact = mul(quotient, b) != a;
    return inexact && (a < T{0}) != (b < T{0}) ? static_cast<T>(quotient - 1) : quotient;
  }
}

template <typename T>
T pow(T a, T b) {
  if constexpr (kIsFloat<T>) {
    return std::pow(a, b);
  } else {
    if (b < T{0}) {
      if (a == T{0}) throw_division_by_zero();
      if (a == T{1}) return a;
      if (a == static_cast<T>(-1)) return b % T{2} == T{0} ? T{1} : a;
      return T{0};
    }
    T result{1};
    for (Unsigned<T> left = static_cast<Unsigned<T>>(b); left != 0; left >>= 1) {
      if (left & 1) result = mul(result, a);
      a = mul(a, a);
    }
    return result;
  }
}

// NaN wins.
template <typename T>
T min(T a, T b) {
  return a < b || a != a ? a : b;
}

template <typename T>
T max(T a, T b) {
  return a > b || a != a ? a : b;
}

}  // namespace ortrain::expr
