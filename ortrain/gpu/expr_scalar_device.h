// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the scalar operations of expression programs (ir/expr_scalar.h) are on a device. The text of
// this file and of expr_block_device.h stands in front of every generated kernel too, where there
// is no standard library: nothing is included here. Names are op_<name of the operation>.

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__)
#define ORTRAIN_EXPR_FUNCTION __device__ inline __attribute__((always_inline))
#define ORTRAIN_EXPR_MATH(name) ::name
#else
#define ORTRAIN_EXPR_FUNCTION inline
#define ORTRAIN_EXPR_MATH(name) __builtin_##name
#endif

namespace ortrain::gpu::scalar {

using U32 = unsigned int;
using U64 = unsigned long long;
using I64 = long long;

// --- types

template <class T>
struct TypeTraits {
  static constexpr bool is_float = false;
  static constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0);
  using Unsigned = T;
};
template <>
struct TypeTraits<float> {
  static constexpr bool is_float = true;
  static constexpr bool is_signed = true;
  using Unsigned = float;
};
template <>
struct TypeTraits<double> {
  static constexpr bool is_float = true;
  static constexpr bool is_signed = true;
  using Unsigned = double;
};
template <class U>
struct SignedTraits {
  static constexpr bool is_float = false;
  static constexpr bool is_signed = true;
  using Unsigned = U;
};
template <>
struct TypeTraits<signed char> : SignedTraits<unsigned char> {};
template <>
struct TypeTraits<short> : SignedTraits<unsigned short> {};
template <>
struct TypeTraits<int> : SignedTraits<unsigned int> {};
template <>
struct TypeTraits<long> : SignedTraits<unsigned long> {};
template <>
struct TypeTraits<long long> : SignedTraits<unsigned long long> {};

template <class A, class B>
struct SameType {
  static constexpr bool value = false;
};
template <class A>
struct SameType<A, A> {
  static constexpr bool value = true;
};

template <class T>
inline constexpr bool kFloat = TypeTraits<T>::is_float;
template <class T>
using UnsignedOf = typename TypeTraits<T>::Unsigned;

// --- bits and 16-bit floats; rounding to nearest, ties to even, NaN stays NaN

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__)
ORTRAIN_EXPR_FUNCTION float float_of_bits(U32 bits) { return __uint_as_float(bits); }
ORTRAIN_EXPR_FUNCTION U32 bits_of_float(float value) { return __float_as_uint(value); }
ORTRAIN_EXPR_FUNCTION double double_of_bits(U64 bits) {
  return __longlong_as_double(static_cast<I64>(bits));
}
#else
ORTRAIN_EXPR_FUNCTION float float_of_bits(U32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
ORTRAIN_EXPR_FUNCTION U32 bits_of_float(float value) {
  U32 bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}
ORTRAIN_EXPR_FUNCTION double double_of_bits(U64 bits) {
  double value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
#endif

ORTRAIN_EXPR_FUNCTION unsigned short bf16_bits(float value) {
#if defined(__CUDA_ARCH__)
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const U32 word = bits_of_float(value);
  if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<unsigned short>((word >> 16) | 0x40u);
  return static_cast<unsigned short>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
#endif
}
ORTRAIN_EXPR_FUNCTION float float_of_bf16(unsigned short bits) {
  return float_of_bits(static_cast<U32>(bits) << 16);
}

ORTRAIN_EXPR_FUNCTION unsigned short f16_bits(float value) {
#if defined(__CUDA_ARCH__)
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const U32 word = bits_of_float(value);
  const U32 sign = (word >> 16) & 0x8000u;
  const U32 magnitude = word & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<unsigned short>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // below 2^-14; adding 0.5 rounds at the last bit of a half
    const U32 rounded = bits_of_float(float_of_bits(magnitude) + 0.5f);
    return static_cast<unsigned short>(sign | (rounded - 0x3f000000u));
  }
  const U32 odd = (magnitude >> 13) & 1u;
  return static_cast<unsigned short>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
#endif
}
ORTRAIN_EXPR_FUNCTION float float_of_f16(unsigned short bits) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  const U32 sign = static_cast<U32>(bits & 0x8000u) << 16;
  const U32 exponent = (bits >> 10) & 0x1fu;
  const U32 fraction = bits & 0x3ffu;
  if (exponent == 0x1fu) return float_of_bits(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) {
    const float value = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  return float_of_bits(sign | ((exponent + 112u) << 23) | (fraction << 13));
#endif
}

// --- Philox 4x32-10 as in base/philox.h

struct PhiloxBlock {
  U32 words[4];
};

// The words of elements 4 * block .. 4 * block + 3.
ORTRAIN_EXPR_FUNCTION PhiloxBlock philox_words(U64 seed, U64 stream, U64 block) {
  U32 c0 = static_cast<U32>(block), c1 = static_cast<U32>(block >> 32);
  U32 c2 = static_cast<U32>(stream), c3 = static_cast<U32>(stream >> 32);
  U32 k0 = static_cast<U32>(seed), k1 = static_cast<U32>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const U64 product0 = U64{0xD2511F53u} * c0;
    const U64 product1 = U64{0xCD9E8D57u} * c2;
    c0 = static_cast<U32>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<U32>(product1);
    c2 = static_cast<U32>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<U32>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The word of one element.
ORTRAIN_EXPR_FUNCTION U32 philox_element(U64 seed, U64 stream, U64 element) {
  const PhiloxBlock block = philox_words(seed, stream, element / 4);
  const U32 low = (element & 1) != 0 ? block.words[1] : block.words[0];
  const U32 high = (element & 1) != 0 ? block.words[3] : block.words[2];
  return (element & 2) != 0 ? high : low;
}

// --- casts

// Truncates; NaN and what does not fit in 64 bits become the lowest integer, and narrower types
// keep the low bits; see ir/expr_scalar.h.
template <class To, class From>
ORTRAIN_EXPR_FUNCTION To float_to_integer(From value) {
  if constexpr (sizeof(To) == 4 && TypeTraits<To>::is_signed) {
    const From inside = value < From(-2147483648.0) ? From(-2147483648.0) : value;
    return value > From(-2147483904.0) && value < From(2147483648.0)
               ? static_cast<To>(inside)
               : static_cast<To>(-2147483647 - 1);
  } else {
    if constexpr (sizeof(To) == 8 && !TypeTraits<To>::is_signed) {
      if (value >= From(9223372036854775808.0) && value < From(18446744073709551616.0)) {
        return static_cast<To>(value);
      }
    }
    const bool fits = value >= From(-9223372036854775808.0) && value < From(9223372036854775808.0);
    const I64 wide = fits ? static_cast<I64>(value) : -9223372036854775807LL - 1;
    return static_cast<To>(wide);
  }
}

template <class To, class From>
ORTRAIN_EXPR_FUNCTION To op_cast(From value) {
  if constexpr (SameType<To, bool>::value) {
    return value != From(0);
  } else if constexpr (kFloat<From> && !kFloat<To>) {
    return float_to_integer<To>(value);
  } else {
    return static_cast<To>(value);
  }
}

// --- one number

template <class T>
ORTRAIN_EXPR_FUNCTION bool is_negative([[maybe_unused]] T x) {
  if constexpr (TypeTraits<T>::is_signed) {
    return x < T(0);
  } else {
    return false;
  }
}

template <class T>
ORTRAIN_EXPR_FUNCTION T op_neg(T x) {
  if constexpr (kFloat<T>) {
    return -x;
  } else {
    return static_cast<T>(UnsignedOf<T>(0) - static_cast<UnsignedOf<T>>(x));
  }
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_abs(T x) {
  if constexpr (SameType<T, float>::value) {
    return ORTRAIN_EXPR_MATH(fabsf)(x);
  } else if constexpr (SameType<T, double>::value) {
    return ORTRAIN_EXPR_MATH(fabs)(x);
  } else {
    return is_negative(x) ? op_neg(x) : x;
  }
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_sign(T x) {
  return x > T(0) ? T(1) : is_negative(x) ? static_cast<T>(-1) : x;
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_relu(T x) {
  return is_negative(x) ? T(0) : x;
}

// --- one float

#define ORTRAIN_EXPR_REAL(name, function)                                                      \
  ORTRAIN_EXPR_FUNCTION float op_##name(float x) { return ORTRAIN_EXPR_MATH(function##f)(x); } \
  ORTRAIN_EXPR_FUNCTION double op_##name(double x) { return ORTRAIN_EXPR_MATH(function)(x); }

ORTRAIN_EXPR_REAL(exp, exp)
ORTRAIN_EXPR_REAL(expm1, expm1)
ORTRAIN_EXPR_REAL(log, log)
ORTRAIN_EXPR_REAL(log1p, log1p)
ORTRAIN_EXPR_REAL(sqrt, sqrt)
ORTRAIN_EXPR_REAL(tanh, tanh)
ORTRAIN_EXPR_REAL(erf, erf)
ORTRAIN_EXPR_REAL(sin, sin)
ORTRAIN_EXPR_REAL(cos, cos)
ORTRAIN_EXPR_REAL(tan, tan)
ORTRAIN_EXPR_REAL(asin, asin)
ORTRAIN_EXPR_REAL(acos, acos)
ORTRAIN_EXPR_REAL(atan, atan)
ORTRAIN_EXPR_REAL(sinh, sinh)
ORTRAIN_EXPR_REAL(cosh, cosh)
ORTRAIN_EXPR_REAL(floor, floor)
ORTRAIN_EXPR_REAL(ceil, ceil)
ORTRAIN_EXPR_REAL(round, rint)
#undef ORTRAIN_EXPR_REAL

template <class T>
ORTRAIN_EXPR_FUNCTION T op_rsqrt(T x) {
  return T(1) / op_sqrt(x);
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_reciprocal(T x) {
  return T(1) / x;
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_sigmoid(T x) {
  const T e = op_exp(-op_abs(x));
  return (is_negative(x) ? e : T(1)) / (T(1) + e);
}
ORTRAIN_EXPR_FUNCTION float op_to_bf16(float x) { return float_of_bf16(bf16_bits(x)); }
ORTRAIN_EXPR_FUNCTION float op_to_f16(float x) { return float_of_f16(f16_bits(x)); }

// --- two numbers; `faults` has division(), which reports an integer division by zero

template <class T>
ORTRAIN_EXPR_FUNCTION T op_add(T a, T b) {
  if constexpr (kFloat<T>) {
    return a + b;
  } else {
    return static_cast<T>(static_cast<UnsignedOf<T>>(a) + static_cast<UnsignedOf<T>>(b));
  }
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_sub(T a, T b) {
  if constexpr (kFloat<T>) {
    return a - b;
  } else {
    return static_cast<T>(static_cast<UnsignedOf<T>>(a) - static_cast<UnsignedOf<T>>(b));
  }
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_mul(T a, T b) {
  if constexpr (kFloat<T>) {
    return a * b;
  } else {
    return static_cast<T>(static_cast<U64>(a) * static_cast<U64>(b));
  }
}
template <class T, class Faults>
ORTRAIN_EXPR_FUNCTION T op_div(T a, T b, const Faults& faults) {
  if constexpr (kFloat<T>) {
    return a / b;
  } else {
    if (b == T(0)) {
      faults.division();
      return T(0);
    }
    if constexpr (TypeTraits<T>::is_signed) {
      if (b == static_cast<T>(-1)) return op_neg(a);
    }
    return static_cast<T>(a / b);
  }
}
template <class T, class Faults>
ORTRAIN_EXPR_FUNCTION T op_fmod(T a, T b, const Faults& faults) {
  if constexpr (SameType<T, float>::value) {
    return ORTRAIN_EXPR_MATH(fmodf)(a, b);
  } else if constexpr (SameType<T, double>::value) {
    return ORTRAIN_EXPR_MATH(fmod)(a, b);
  } else {
    if (b == T(0)) {
      faults.division();
      return T(0);
    }
    if constexpr (TypeTraits<T>::is_signed) {
      if (b == static_cast<T>(-1)) return T(0);
    }
    return static_cast<T>(a % b);
  }
}
template <class T, class Faults>
ORTRAIN_EXPR_FUNCTION T op_mod(T a, T b, const Faults& faults) {
  const T remainder = op_fmod(a, b, faults);
  if (remainder != T(0) && is_negative(remainder) != is_negative(b))
    return static_cast<T>(remainder + b);
  return remainder;
}
template <class T, class Faults>
ORTRAIN_EXPR_FUNCTION T op_floor_div(T a, T b, const Faults& faults) {
  if constexpr (kFloat<T>) {
    if (b == T(0)) return a / b;
    const T remainder = op_fmod(a, b, faults);
    T quotient = (a - remainder) / b;
    if (remainder != T(0) && is_negative(remainder) != is_negative(b)) quotient -= T(1);
    if (quotient == T(0)) {
      if constexpr (sizeof(T) == 4) {
        return ORTRAIN_EXPR_MATH(copysignf)(T(0), a / b);
      } else {
        return ORTRAIN_EXPR_MATH(copysign)(T(0), a / b);
      }
    }
    const T floored = op_floor(quotient);
    return quotient - floored > T(0.5) ? floored + T(1) : floored;
  } else {
    const T quotient = op_div(a, b, faults);
    const bool inexact = op_mul(quotient, b) != a;
    return inexact && is_negative(a) != is_negative(b) ? static_cast<T>(quotient - 1)
                                                           : quotient;
  }
}
template <class T, class Faults>
ORTRAIN_EXPR_FUNCTION T op_pow(T a, T b, const Faults& faults) {
  if constexpr (SameType<T, float>::value) {
    return ORTRAIN_EXPR_MATH(powf)(a, b);
  } else if constexpr (SameType<T, double>::value) {
    return ORTRAIN_EXPR_MATH(pow)(a, b);
  } else {
    if (is_negative(b)) {
      if (a == T(0)) faults.division();
      if (a == T(1)) return a;
      if (a == static_cast<T>(-1)) return b % T(2) == T(0) ? T(1) : a;
      return T(0);
    }
    T result(1);
    for (UnsignedOf<T> left = static_cast<UnsignedOf<T>>(b); left != 0; left >>= 1) {
      if ((left & 1) != 0) result = op_mul(result, a);
      a = op_mul(a, a);
    }
    return result;
  }
}
// NaN wins.
template <class T>
ORTRAIN_EXPR_FUNCTION T op_min(T a, T b) {
  return a < b || a != a ? a : b;
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_max(T a, T b) {
  return a > b || a != a ? a : b;
}

// --- comparisons, logic, bits

template <class T>
ORTRAIN_EXPR_FUNCTION bool op_eq(T a, T b) {
  return a == b;
}
template <class T>
ORTRAIN_EXPR_FUNCTION bool op_ne(T a, T b) {
  return a != b;
}
template <class T>
ORTRAIN_EXPR_FUNCTION bool op_lt(T a, T b) {
  return a < b;
}
template <class T>
ORTRAIN_EXPR_FUNCTION bool op_le(T a, T b) {
  return a <= b;
}
ORTRAIN_EXPR_FUNCTION bool op_and(bool a, bool b) { return a && b; }
ORTRAIN_EXPR_FUNCTION bool op_or(bool a, bool b) { return a || b; }
ORTRAIN_EXPR_FUNCTION bool op_xor(bool a, bool b) { return a != b; }
ORTRAIN_EXPR_FUNCTION bool op_not(bool a) { return !a; }
template <class T>
ORTRAIN_EXPR_FUNCTION T op_bit_and(T a, T b) {
  return static_cast<T>(a & b);
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_bit_or(T a, T b) {
  return static_cast<T>(a | b);
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_bit_xor(T a, T b) {
  return static_cast<T>(a ^ b);
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_bit_not(T a) {
  return static_cast<T>(~a);
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_select(bool condition, T a, T b) {
  return condition ? a : b;
}
template <class T>
ORTRAIN_EXPR_FUNCTION T op_dropout(T x, U32 word, U32 threshold, T scale) {
  return x * (word >= threshold ? scale : T(0));
}

}  // namespace ortrain::gpu::scalar
