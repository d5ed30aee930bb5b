// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "ortrain/base/dim.h"

namespace ortrain::cpu {

// Copies a box of elements between two strided layouts of any element type:
//   out[out_offset + sum_k i_k out_strides_k] = in[in_offset + sum_k i_k in_strides_k]
// for all i below `dims`. Strides and offsets count elements; input strides may be zero or negative
// (expand, flip), output strides must not overlap. Contiguous runs become memcpy, permuted inner
// axes go through cache blocks. In parallel, without allocation.
class StridedCopy {
 public:
  // element_size is 1, 2, 4 or 8. Throws UnsupportedError if more than 32 axes remain after
  // merging.
  StridedCopy(size_t element_size, Dims dims, Dims in_strides, Dims out_strides,
              int64_t in_offset = 0, int64_t out_offset = 0);

  void run(const void* in, void* out) const;

 private:
  enum class Kind { empty, rows, fill, transpose, strided };

  template <size_t kSize>
  void run_sized(const std::byte* in, std::byte* out) const;
  template <typename Body>
  void for_each_outer(int64_t begin, int64_t end, const Body& body) const;

  Kind kind_ = Kind::empty;
  size_t element_size_;
  // Outer axes, then what the kind treats as one piece: a row, or for `transpose` a matrix.
  Dims outer_dims_, outer_in_, outer_out_;
  int64_t outer_count_ = 1;
  int64_t rows_ = 1, columns_ = 1;          // the matrix; a row has rows_ = 1
  int64_t in_row_ = 0, out_row_ = 0;        // strides between rows (transpose: in_row_ = 1)
  int64_t in_column_ = 1, out_column_ = 1;  // strides inside a row
  int64_t in_offset_, out_offset_;
};

// out[i] = *element for i < count, in parallel. element_size is 1, 2, 4 or 8.
void fill_elements(void* out, int64_t count, size_t element_size, const void* element);

}  // namespace ortrain::cpu
