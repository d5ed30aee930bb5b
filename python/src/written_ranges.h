// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "python/src/tensor_exchange.h"

namespace ortrain::python {

// The memory that the parameters of one step are written to and read from, in order to tell whether
// one may be worked on before, or beside, another.
class WrittenRanges {
 public:
  void clear() {
    now_.clear();
    reads_.clear();
  }
  void write(size_t item, const TensorView& view) { add(now_, item, view); }
  void read(size_t item, const TensorView& view) { add(reads_, item, view); }

  // Whether one item writes to memory of another; by the first and the last byte of each tensor.
  bool are_shared() {
    if (now_ != before_) {
      before_ = now_;
      sorted_ = now_;
      std::sort(sorted_.begin(), sorted_.end(),
                [](const Range& a, const Range& b) { return a.begin < b.begin; });
      writes_are_shared_ = false;
      for (size_t i = 1; i < sorted_.size(); ++i) {
        // The ranges before are apart, or all of one item.
        Range& left = sorted_[i - 1];
        if (sorted_[i].begin < left.end && sorted_[i].item != left.item) writes_are_shared_ = true;
        if (left.end > sorted_[i].end) sorted_[i].end = left.end;
      }
    }
    return writes_are_shared_ || std::any_of(reads_.begin(), reads_.end(), [&](const Range& read) {
             return meets_another(read);
           });
  }

 private:
  struct Range {
    uintptr_t begin, end;
    size_t item;
    bool operator==(const Range&) const = default;
  };

  static void add(std::vector<Range>& ranges, size_t item, const TensorView& view) {
    int64_t lowest = 0, highest = 1, row = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      if (view.dims[i] == 0) return;
      const int64_t stride = view.strides != nullptr ? view.strides[i] : row;
      (stride < 0 ? lowest : highest) += (view.dims[i] - 1) * stride;
      row *= view.dims[i];
    }
    const auto at = reinterpret_cast<uintptr_t>(view.data);
    const auto size = static_cast<int64_t>(size_of(view.dtype));
    ranges.push_back({at + static_cast<uintptr_t>(lowest * size),
                      at + static_cast<uintptr_t>(highest * size), item});
  }

  // The ranges of what is written are apart here.
  bool meets_another(const Range& read) const {
    auto it =
        std::upper_bound(sorted_.begin(), sorted_.end(), read.begin,
                         [](uintptr_t begin, const Range& range) { return begin < range.end; });
    for (; it != sorted_.end() && it->begin < read.end; ++it) {
      if (it->item != read.item) return true;
    }
    return false;
  }

  std::vector<Range> now_, reads_;
  std::vector<Range> before_;  // as they were added when `sorted_` was made
  std::vector<Range> sorted_;
  bool writes_are_shared_ = false;
};

}  // namespace ortrain::python
