// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "ortrain/base/dim.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/words.h"

namespace ortrain::gpu {

// An axis as kernels see it: its extent, and a step in both tensors.
struct CopyAxis {
  Divider extent;
  int64_t in = 0, out = 0;
};

// The axes of a copy, outermost first, for kernels.
struct CopyAxes {
  static constexpr int kMost = 12;
  int count = 0;
  CopyAxis axes[kMost];

  // Where element `i` in row-major order lies. `i` is uint32_t or int64_t, which must hold it.
  template <class Index>
  ORTRAIN_DEVICE void locate(Index i, int64_t& in, int64_t& out) const {
    for (int k = count - 1; k > 0; --k) {
      const Index rest = axes[k].extent.divide(i);
      const int64_t digit = i - rest * static_cast<Index>(axes[k].extent.divisor);
      in += digit * axes[k].in;
      out += digit * axes[k].out;
      i = rest;
    }
    if (count > 0) {
      in += static_cast<int64_t>(i) * axes[0].in;
      out += static_cast<int64_t>(i) * axes[0].out;
    }
  }
};

// Extents and steps with axes of extent 1 left out, those of negative output steps turned round,
// and neighbours merged that step through both tensors as one axis.
struct MergedAxes {
  Dims dims, in, out;
  int64_t in_offset = 0, out_offset = 0;

  MergedAxes(const Dims& dims, const Dims& in_strides, const Dims& out_strides,
             int64_t in_offset = 0, int64_t out_offset = 0);
  // Throws UnsupportedError when they are too many for a kernel.
  CopyAxes for_kernels() const;
};

// Copies a box of elements between two strided layouts of any element type:
//   out[out_offset + sum_k i_k out_strides_k] = in[in_offset + sum_k i_k in_strides_k]
// for all i below `dims`. Strides and offsets count elements; input strides may be zero or
// negative, output strides must not overlap. Runs that both sides have in one piece move in words
// of up to 16 bytes, as far as strides and addresses allow; a matrix that changes its order goes
// through shared memory in tiles. One launch.
class StridedCopy {
 public:
  // element_size is 1, 2, 4 or 8. Throws UnsupportedError if more than CopyAxes::kMost axes remain
  // after merging.
  StridedCopy(size_t element_size, const Dims& dims, const Dims& in_strides,
              const Dims& out_strides, int64_t in_offset = 0, int64_t out_offset = 0);

  void run(const void* in, void* out, void* stream) const;

 private:
  enum class Kind { rows, fill, matrix, strided };

  void run_words(const void* in, void* out, void* stream) const;
  void run_matrix(const void* in, void* out, void* stream) const;

  int size_;  // of an element, bytes
  int64_t elements_ = 0;
  Kind kind_ = Kind::strided;
  MergedAxes merged_;
  CopyAxes axes_;
  int word_ = 1;  // the widest that strides and offsets allow
  // The matrix: rows_ x columns_ elements, which are neighbours in a row on the output's side, in a
  // column on the input's.
  int64_t rows_ = 1, columns_ = 1, in_column_ = 0, out_row_ = 0;
  int vector_ = 1;  // elements that move at a time
};

// The reason that `make` gives for refusing by UnsupportedError, for Kernel::why_not.
std::optional<std::string> refusal_of(const std::function<void()>& make);

// out[i] = the element whose bytes are the lowest of `bits`, i < count. element_size as above.
void fill_elements(void* out, int64_t count, size_t element_size, uint64_t bits, void* stream);

// `bytes` from one place to another on the device, which do not overlap.
void copy_bytes(const void* from, void* to, int64_t bytes, void* stream);

}  // namespace ortrain::gpu
