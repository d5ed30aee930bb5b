// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/byte_count.h"

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

[[noreturn]] void refuse_bytes() {
  throw ShapeError(str("more than 2^47 bytes would be needed, no machine has them"));
}

}  // namespace

namespace internal {

int64_t checked_product(const int64_t* extents, size_t count) {
  int64_t product = 1;
  bool empty = false;
  for (size_t i = 0; i < count; ++i) {
    if (extents[i] < 0) throw ShapeError(str("an extent of ", extents[i], " is negative"));
    if (extents[i] == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, extents[i], &product)) {
      throw ShapeError("a number of elements leaves int64");
    }
  }
  return empty ? 0 : product;
}

int64_t checked_extent(uint64_t extent) {
  if (extent > static_cast<uint64_t>(INT64_MAX)) refuse_bytes();
  return static_cast<int64_t>(extent);
}

}  // namespace internal

void check_extents(const Dims& dims, size_t element_size) {
  int64_t bytes = static_cast<int64_t>(element_size);
  for (int64_t dim : dims) {
    if (dim < 0) throw ShapeError(str("negative extent in shape ", dims_str(dims)));
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(dim, 1), &bytes) || bytes > kMostBytes) {
      throw ShapeError(str("a tensor of shape ", dims_str(dims),
                           " is too large: its extents, without those of 0, "
                           "multiply to more than 2^47 bytes"));
    }
  }
}

void check_extents(const Shape& shape, size_t element_size) {
  Dims known;
  for (const Dim& dim : shape) {
    if (dim.is_constant()) known.push_back(dim.constant());
  }
  check_extents(known, element_size);
}

ByteCount ByteCount::rounded_up(size_t unit) const {
  const int64_t step = static_cast<int64_t>(unit);
  return ByteCount(checked(unit, bytes_ / step + (bytes_ % step != 0)));
}

int64_t ByteCount::checked(size_t size, int64_t count) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(internal::checked_extent(size), count, &bytes) || bytes > kMostBytes) {
    refuse_bytes();
  }
  return bytes;
}

int64_t ByteCount::sum(int64_t a, int64_t b) {
  if (a > kMostBytes - b) refuse_bytes();
  return a + b;
}

}  // namespace ortrain
