// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "ortrain/base/dim.h"
#include "ortrain/gpu/device_code.h"

// Memory in words of 1 to 16 bytes, for kernels that move elements whatever their type: as wide as
// addresses and strides allow.
namespace ortrain::gpu {

#if defined(__CUDACC__) && !defined(__HIPCC__)
#define ORTRAIN_MAY_ALIAS
#else
#define ORTRAIN_MAY_ALIAS __attribute__((may_alias))
#endif

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using type = uint8_t;
};
template <>
struct WordOf<2> {
  using type ORTRAIN_MAY_ALIAS = uint16_t;
};
template <>
struct WordOf<4> {
  using type ORTRAIN_MAY_ALIAS = uint32_t;
};
template <>
struct WordOf<8> {
  using type ORTRAIN_MAY_ALIAS = uint64_t;
};
#if defined(__CUDACC__) && !defined(__HIPCC__)
template <>
struct WordOf<16> {
  using type = uint4;
};
#else
struct __attribute__((may_alias, aligned(16))) Word16 {
  uint64_t low, high;
};
template <>
struct WordOf<16> {
  using type = Word16;
};
#endif

// kBytes from `address`, which is a multiple of them; they may be elements of any type.
template <int kBytes>
ORTRAIN_DEVICE typename WordOf<kBytes>::type load_word(const void* address) {
  return *static_cast<const typename WordOf<kBytes>::type*>(address);
}

// A word of copies of one element. kElement divides kWord.
template <int kWord, int kElement>
ORTRAIN_DEVICE typename WordOf<kWord>::type splat(typename WordOf<kElement>::type element) {
  typename WordOf<kWord>::type word;
  for (int i = 0; i < kWord / kElement; ++i) {
    __builtin_memcpy(reinterpret_cast<unsigned char*>(&word) + i * kElement, &element, kElement);
  }
  return word;
}

// kCount elements in registers.
template <class T, int kCount>
struct Vector {
  T values[kCount];
  ORTRAIN_DEVICE T& operator[](int i) { return values[i]; }
  ORTRAIN_DEVICE const T& operator[](int i) const { return values[i]; }
};

// They lie at a multiple of their bytes, which are 1 to 16 and a power of two.
template <int kCount, class T>
ORTRAIN_DEVICE Vector<T, kCount> load_vector(const T* from) {
  const auto word = load_word<kCount* static_cast<int>(sizeof(T))>(from);
  Vector<T, kCount> vector;
  __builtin_memcpy(static_cast<void*>(&vector), &word, sizeof(word));
  return vector;
}
template <int kCount, class T>
ORTRAIN_DEVICE void store_vector(T* to, const Vector<T, kCount>& vector) {
  using Word = typename WordOf<kCount* static_cast<int>(sizeof(T))>::type;
  Word word;
  __builtin_memcpy(&word, &vector, sizeof(word));
  *reinterpret_cast<Word*>(to) = word;
}

// Division by a number known on the host, of numbers below 2^31, by a multiplication (Granlund and
// Montgomery 1994); of larger ones as it is.
struct Divider {
  int64_t divisor = 1;
  uint32_t magic = 1;
  uint32_t shift = 0;

  Divider() = default;
  explicit Divider(int64_t by) : divisor(by) {
    if (by <= 0 || by >= int64_t{1} << 31) return;
    while ((int64_t{1} << shift) < by) ++shift;
    const uint64_t rest = (uint64_t{1} << shift) - static_cast<uint64_t>(by);
    magic = static_cast<uint32_t>((rest << 32) / static_cast<uint64_t>(by) + 1);
  }

  // uint32_t: below 2^31, and so is the divisor.
  ORTRAIN_DEVICE uint32_t divide(uint32_t n) const {
    return (static_cast<uint32_t>((uint64_t{n} * magic) >> 32) + n) >> shift;
  }
  ORTRAIN_DEVICE int64_t divide(int64_t n) const { return n / divisor; }
};

// Whether numbers up to `largest` are indices of 64 bits.
inline bool needs_wide(int64_t largest) { return largest >= int64_t{1} << 31; }

// Calls body(Index{}) with uint32_t or int64_t.
template <class Body>
void dispatch_width(int64_t largest, const Body& body) {
  if (needs_wide(largest)) {
    body(int64_t{});
  } else {
    body(uint32_t{});
  }
}

// The widest word of 16 bytes or less that divides all the numbers of bytes, which may be negative.
inline int common_word(std::initializer_list<int64_t> bytes, int most = 16) {
  for (int64_t number : bytes) {
    while (number % most != 0) most /= 2;
  }
  return most;
}
inline int word_of_address(const void* address, int most = 16) {
  return common_word({static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) % 16)}, most);
}

// Calls body(std::integral_constant<int, bytes>).
template <class Body>
void dispatch_word(int bytes, const Body& body) {
  switch (bytes) {
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    case 4:
      return body(std::integral_constant<int, 4>());
    case 8:
      return body(std::integral_constant<int, 8>());
    default:
      return body(std::integral_constant<int, 16>());
  }
}

}  // namespace ortrain::gpu
