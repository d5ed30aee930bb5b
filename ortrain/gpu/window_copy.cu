// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ortrain/base/dim.h"
#include "ortrain/gpu/window_copy.h"

namespace ortrain::gpu {
namespace {

struct KernelAxis {
  Divider extent;
  Divider step;
  int64_t start = 0, in_extent = 1, in_stride = 1;
};
struct Window {
  int count = 0;
  Outside outside = Outside::value;
  KernelAxis axes[WindowCopy::kMostAxes];
};

// Steps count words; the value is one element.
template <int kWord, int kElement, class Index>
__global__ void __launch_bounds__(kItemThreads)
    copy_window(Window window, int64_t count, const void* in_address, const void* value_address,
                void* out_address) {
  using Word = typename WordOf<kWord>::type;
  using Element = typename WordOf<kElement>::type;
  const Word* in = static_cast<const Word*>(in_address);
  Word* out = static_cast<Word*>(out_address);
  const Element value =
      value_address != nullptr ? load_word<kElement>(value_address) : static_cast<Element>(0);
  const Word empty = splat<kWord, kElement>(value);
  for_each_item(count, [&](int64_t i) {
    Index rest = static_cast<Index>(i);
    int64_t from = 0;
    bool inside = true;
    for (int k = window.count - 1; k >= 0; --k) {
      const KernelAxis& axis = window.axes[k];
      const Index quotient = k == 0 ? 0 : axis.extent.divide(rest);
      const int64_t place = rest - quotient * static_cast<Index>(axis.extent.divisor);
      rest = quotient;
      int64_t at = place - axis.start;
      if (window.outside != Outside::value) {
        at = source_of(at, axis.in_extent, window.outside);
      } else {
        if (axis.step.divisor != 1 && at >= 0) {
          const int64_t whole = axis.step.divide(static_cast<Index>(at));
          inside = inside && whole * axis.step.divisor == at;
          at = whole;
        }
        inside = inside && at >= 0 && at < axis.in_extent;
      }
      from += at * axis.in_stride;
    }
    out[i] = inside ? in[from] : empty;
  });
}

// Whether an axis and the whole axis behind it are one axis for both tensors.
bool merges(const WindowAxis& axis, const WindowAxis& next, Outside outside) {
  if (!next.is_whole() || axis.in_stride != next.in_stride * next.in_extent) return false;
  return axis.is_whole() || (axis.step == 1 && outside == Outside::value);
}

}  // namespace

Outside outside_of(const std::string& mode) {
  return mode == "edge"      ? Outside::edge
         : mode == "reflect" ? Outside::reflect
         : mode == "wrap"    ? Outside::wrap
                             : Outside::value;
}

WindowCopy::WindowCopy(size_t element_size, std::vector<WindowAxis> axes, Outside outside,
                       int64_t in_offset)
    : size_(static_cast<int64_t>(element_size)),
      outside_(outside),
      in_offset_(in_offset),
      word_(static_cast<int>(element_size)) {
  for (WindowAxis axis : axes) {
    if (outside == Outside::value && axis.step == 1) {
      // A window that lies far off shows as little as one beside the output.
      axis.start = std::clamp(axis.start, -axis.in_extent, axis.out_extent);
    }
    elements_ *= axis.out_extent;
    if (axis.out_extent == 1 && axis.is_whole()) continue;
    if (!axes_.empty() && merges(axes_.back(), axis, outside)) {
      WindowAxis& last = axes_.back();
      last.out_extent *= axis.out_extent;
      last.in_extent *= axis.in_extent;
      last.start *= axis.out_extent;
      last.in_stride = axis.in_stride;
    } else {
      axes_.push_back(axis);
    }
  }
  if (elements_ == 0) return;
  if (axes_.empty()) axes_.push_back({});
  if (axes_.size() > static_cast<size_t>(kMostAxes)) {
    throw UnsupportedError(str("padding of more than ", kMostAxes, " separate axes"));
  }
  const WindowAxis& last = axes_.back();
  const bool in_runs =
      last.in_stride == 1 && last.step == 1 && (last.is_whole() || outside_ == Outside::value);
  if (!in_runs) return;
  word_ = common_word(
      {last.out_extent * size_, last.start * size_, last.in_extent * size_, in_offset_ * size_});
  for (size_t k = 0; k + 1 < axes_.size(); ++k) {
    word_ = common_word({axes_[k].in_stride * size_}, word_);
  }
}

void WindowCopy::run(const void* in, void* out, const void* value, void* stream) const {
  if (elements_ == 0) return;
  const int size = static_cast<int>(size_);
  const int word = std::max(size, word_of_address(out, word_of_address(in, word_)));
  const int64_t ratio = word / size;
  Window window;
  window.outside = outside_;
  for (const WindowAxis& axis : axes_) {
    const bool last = window.count + 1 == static_cast<int>(axes_.size());
    const int64_t by = last ? ratio : 1;
    window.axes[window.count++] = {Divider(axis.out_extent / by), Divider(axis.step),
                                   axis.start / by, axis.in_extent / by,
                                   last ? axis.in_stride : axis.in_stride / ratio};
  }
  const auto* from = static_cast<const unsigned char*>(in) + in_offset_ * size_;
  const int64_t count = elements_ / ratio;
  int64_t largest = count;
  for (const WindowAxis& axis : axes_) largest = std::max(largest, axis.step);
  dispatch_width(largest, [&](auto index) {
    dispatch_word(word, [&](auto word_bytes) {
      dispatch_word(size, [&](auto bytes) {
        constexpr int kWord = decltype(word_bytes)::value;
        constexpr int kElement = decltype(bytes)::value;
        if constexpr (kElement <= kWord && kElement <= 8) {
          launch(copy_window<kWord, kElement, decltype(index)>, items(count), stream, window, count,
                 from, value, out);
        }
      });
    });
  });
}

}  // namespace ortrain::gpu
