// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "ortrain/base/dim.h"

namespace ortrain {

// No processor here addresses more: x86-64 gives a process 2^47 bytes.
inline constexpr int64_t kMostBytes = int64_t{1} << 47;

// Product of extents that need not belong to one tensor. Throws ShapeError where one is negative or
// the product leaves int64; an extent of 0 makes it 0 only if the others fit.
template <std::integral... Extents>
int64_t count_elements(Extents... extents);

// Throws ShapeError unless a tensor of these extents, those of 0 counted as 1, would fit into
// kMostBytes: then products of some of its extents, and offsets into it, are far from the end of
// int64.
void check_extents(const Dims& dims, size_t element_size);
// The same of the extents that are known. Values of graphs are checked when they are made, so that
// whoever multiplies known extents of one of them need not.
void check_extents(const Shape& shape, size_t element_size);

// Bytes that somebody asks for. Sums and products throw ShapeError above kMostBytes, so that none
// wraps; there is no way from a plain number but of(), which says what the number counts.
class ByteCount {
 public:
  constexpr ByteCount() = default;

  // `extents` elements of `size` bytes each.
  template <std::integral... Extents>
  static ByteCount of(size_t size, Extents... extents) {
    return ByteCount(checked(size, count_elements(extents...)));
  }

  size_t value() const { return static_cast<size_t>(bytes_); }
  ByteCount rounded_up(size_t unit) const;

  friend ByteCount operator+(ByteCount a, ByteCount b) {
    return ByteCount(sum(a.bytes_, b.bytes_));
  }
  friend ByteCount operator*(ByteCount a, std::integral auto times) {
    return ByteCount(checked(static_cast<size_t>(a.bytes_), count_elements(times)));
  }
  ByteCount& operator+=(ByteCount other) { return *this = *this + other; }
  friend auto operator<=>(ByteCount, ByteCount) = default;

 private:
  constexpr explicit ByteCount(int64_t bytes) : bytes_(bytes) {}
  static int64_t checked(size_t size, int64_t count);
  static int64_t sum(int64_t a, int64_t b);

  int64_t bytes_ = 0;  // at most kMostBytes
};

// Bytes of extents[0] * extents[1] * ... elements of T.
template <class T, std::integral... Extents>
ByteCount bytes_of(Extents... extents) {
  return ByteCount::of(sizeof(T), extents...);
}

namespace internal {
int64_t checked_product(const int64_t* extents, size_t count);
int64_t checked_extent(uint64_t extent);
}  // namespace internal

template <std::integral... Extents>
int64_t count_elements(Extents... extents) {
  const int64_t all[] = {1, [](auto extent) {
                           if constexpr (std::is_signed_v<decltype(extent)>) {
                             return static_cast<int64_t>(extent);
                           } else {
                             return internal::checked_extent(extent);
                           }
                         }(extents)...};
  return internal::checked_product(all, std::size(all));
}

}  // namespace ortrain
