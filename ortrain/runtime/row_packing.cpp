// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/row_packing.h"

#include <algorithm>
#include <cstring>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/dtype.h"
#include "ortrain/base/half.h"

namespace ortrain {
namespace {

// Below this a score leaves no trace in a softmax with any other key.
constexpr float kNever = -1e30f;
// Of all rows; what packing costs beside the layers is about a tenth of a percent.
constexpr double kMostKept = 0.95;

int64_t granule(int64_t rows) { return rows < 128 ? 8 : rows < 512 ? 16 : 32; }

// 1 where the key is seen, 0 where it is not; false if the value is another.
template <class T>
bool read_floats(const void* data, int64_t begin, int64_t count, uint8_t* seen) {
  const T* values = static_cast<const T*>(data) + begin;
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(values[i]);
    if (value != 0.0f && !(value <= kNever)) return false;
    seen[i] = value == 0.0f;
  }
  return true;
}

class MaskReader {
 public:
  MaskReader(const MaskView& view, int64_t length)
      : view_(view),
        length_(length),
        batch_stride_(view.dims[0] == 1 ? 0 : view.dims[2] * length),
        row_stride_(view.dims[2] == 1 ? 0 : length) {}

  // The keys that query `row` sees; null if the mask holds other numbers.
  const uint8_t* row(int64_t batch, int64_t row, std::vector<uint8_t>& buffer) const {
    const int64_t begin = batch * batch_stride_ + row * row_stride_;
    buffer.resize(static_cast<size_t>(length_));
    if (view_.dtype == DType::boolean) {
      // PyTorch takes any byte but 0 for true.
      const uint8_t* bytes = static_cast<const uint8_t*>(view_.data) + begin;
      for (int64_t j = 0; j < length_; ++j) buffer[static_cast<size_t>(j)] = bytes[j] != 0;
      return buffer.data();
    }
    return read(begin, buffer.data()) ? buffer.data() : nullptr;
  }

  bool same_for_all_queries() const { return row_stride_ == 0; }

 private:
  bool read(int64_t begin, uint8_t* seen) const {
    switch (view_.dtype) {
      case DType::f32:
        return read_floats<float>(view_.data, begin, length_, seen);
      case DType::f64:
        return read_floats<double>(view_.data, begin, length_, seen);
      case DType::f16:
        return false;  // its smallest number is not small enough
      case DType::bf16:
        return read_floats<BFloat16>(view_.data, begin, length_, seen);
      default:
        return false;
    }
  }

  const MaskView& view_;
  const int64_t length_, batch_stride_, row_stride_;
};

// How the kept queries of a sequence see its kept keys.
struct Sight {
  bool full = true, causal = true;
};

// Marks the keys that any query sees.
bool mark_seen(const MaskReader& mask, int64_t batch, int64_t length, uint8_t* keep) {
  std::vector<uint8_t> buffer;
  const int64_t rows = mask.same_for_all_queries() ? 1 : length;
  for (int64_t i = 0; i < rows; ++i) {
    const uint8_t* seen = mask.row(batch, i, buffer);
    if (seen == nullptr) return false;
    for (int64_t j = 0; j < length; ++j) keep[j] |= seen[j];
  }
  return true;
}

void compare(const MaskReader& mask, int64_t batch, int64_t length, const uint8_t* keep,
             Sight& sight) {
  std::vector<uint8_t> buffer;
  const auto size = static_cast<size_t>(length);
  for (int64_t i = 0; i < length && (sight.full || sight.causal); ++i) {
    if (keep[i] == 0) continue;
    const uint8_t* seen = mask.row(batch, i, buffer);
    const auto until = static_cast<size_t>(i + 1);
    const bool past = std::memcmp(seen, keep, until) == 0;
    sight.full = sight.full && past && std::memcmp(seen + until, keep + until, size - until) == 0;
    sight.causal = sight.causal && past &&
                   std::all_of(seen + until, seen + size, [](uint8_t see) { return see == 0; });
  }
}

}  // namespace

std::optional<RowPacking> pack_rows(std::span<const MaskView> masks, int64_t batch, int64_t length,
                                    std::span<const int64_t> picked) {
  for (const int64_t position : picked) {
    if (position < 0 || position >= length) return std::nullopt;
  }
  for (const MaskView& mask : masks) {
    if (mask.dims.size() != 4) return std::nullopt;
    const auto is = [&](size_t axis, int64_t extent) {
      return mask.dims[axis] == 1 || mask.dims[axis] == extent;
    };
    if (!is(0, batch) || mask.dims[1] != 1 || !is(2, length) || mask.dims[3] != length) {
      return std::nullopt;
    }
  }
  std::vector<uint8_t> keep(static_cast<size_t>(count_elements(batch, length)), 0);
  for (size_t m = 0; m < masks.size(); ++m) {
    const MaskReader mask(masks[m], length);
    for (int64_t b = 0; b < batch; ++b) {
      if (!mark_seen(mask, b, length, keep.data() + b * length)) return std::nullopt;
    }
  }
  for (int64_t b = 0; b < batch; ++b) {
    for (const int64_t position : picked) keep[static_cast<size_t>(b * length + position)] = 1;
  }
  const int64_t kept = std::count(keep.begin(), keep.end(), 1);
  const int64_t unit = granule(kept);
  const int64_t rows = (kept + unit - 1) / unit * unit;
  if (kept == 0 || static_cast<double>(rows) > kMostKept * static_cast<double>(batch * length)) {
    return std::nullopt;
  }
  Sight sight;
  for (const MaskView& view : masks) {
    const MaskReader mask(view, length);
    for (int64_t b = 0; b < batch; ++b) compare(mask, b, length, keep.data() + b * length, sight);
  }
  if (!sight.full && !sight.causal) return std::nullopt;

  RowPacking made;
  made.causal = !sight.full;
  made.picked.resize(picked.size());
  made.offsets.push_back(0);
  std::vector<int64_t> place(static_cast<size_t>(length));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < length; ++i) {
      if (keep[static_cast<size_t>(b * length + i)] == 0) continue;
      place[static_cast<size_t>(i)] = static_cast<int64_t>(made.positions.size());
      made.positions.push_back(b * length + i);
      made.columns.push_back(i);
      made.sequences.push_back(b);
    }
    made.offsets.push_back(static_cast<int64_t>(made.positions.size()));
    for (size_t k = 0; k < picked.size(); ++k) {
      made.picked[k].push_back(place[static_cast<size_t>(picked[k])]);
    }
  }
  // Copies of a row that is kept: whatever the layers make of it, they make of that row too.
  for (std::vector<int64_t>* list : {&made.positions, &made.columns, &made.sequences}) {
    list->resize(static_cast<size_t>(rows), list->front());
  }
  return made;
}

}  // namespace ortrain
