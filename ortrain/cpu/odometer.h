// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "ortrain/base/dim.h"
#include "ortrain/base/error.h"

namespace ortrain::cpu {

// Steps through a box in row-major order and keeps the offset that the strides give. The box must
// have elements, and `dims` and `strides` must outlive it.
class Odometer {
 public:
  static constexpr size_t kMaxAxes = 64;

  // Call while a kernel is made: throws UnsupportedError above kMaxAxes.
  static void check_rank(size_t rank) {
    if (rank > kMaxAxes) throw UnsupportedError(str("rank ", rank, " is above ", kMaxAxes));
  }

  Odometer(const Dims& dims, const Dims& strides, int64_t start)
      : dims_(dims.data()), strides_(strides.data()), axes_(dims.size()) {
    for (size_t k = axes_; k-- > 0;) {
      index_[k] = start % dims_[k];
      start /= dims_[k];
      offset_ += index_[k] * strides_[k];
    }
  }

  int64_t offset() const { return offset_; }
  int64_t index(size_t axis) const { return index_[axis]; }

  void next() {
    for (size_t k = axes_; k-- > 0;) {
      offset_ += strides_[k];
      if (++index_[k] < dims_[k]) return;
      offset_ -= dims_[k] * strides_[k];
      index_[k] = 0;
    }
  }

 private:
  const int64_t* dims_;
  const int64_t* strides_;
  size_t axes_;
  int64_t index_[kMaxAxes];
  int64_t offset_ = 0;
};

}  // namespace ortrain::cpu
