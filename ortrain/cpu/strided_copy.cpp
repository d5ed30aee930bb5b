// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/strided_copy.h"

#include <algorithm>
#include <cstring>

#include "ortrain/base/error.h"
#include "ortrain/cpu/threads.h"

namespace ortrain::cpu {
namespace {

constexpr int64_t kMaxAxes = 32;
// Bytes that are worth a thread of their own.
constexpr int64_t kGrainBytes = 64 * 1024;
constexpr int64_t kTile = 16;  // a cache line of 4-byte elements each way

// Elements as integers of their size; they alias whatever type the tensor has.
template <size_t kSize>
struct Word;
template <>
struct Word<1> {
  using type = uint8_t;
};
template <>
struct Word<2> {
  using type __attribute__((may_alias)) = uint16_t;
};
template <>
struct Word<4> {
  using type __attribute__((may_alias)) = uint32_t;
};
template <>
struct Word<8> {
  using type __attribute__((may_alias)) = uint64_t;
};

typedef uint32_t Lanes4 __attribute__((vector_size(16)));

// Lanes of a (0 to 3) and b (4 to 7).
template <uint32_t I0, uint32_t I1, uint32_t I2, uint32_t I3>
Lanes4 pick(Lanes4 a, Lanes4 b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I0, I1, I2, I3);
#else
  return __builtin_shuffle(a, b, Lanes4{I0, I1, I2, I3});
#endif
}

// out[i * out_row + j] = in[j * in_column + i] for i < 4, j < 4.
inline void transpose_4x4(const uint32_t* in, int64_t in_column, uint32_t* out, int64_t out_row) {
  Lanes4 a, b, c, d;
  std::memcpy(&a, in, 16);
  std::memcpy(&b, in + in_column, 16);
  std::memcpy(&c, in + 2 * in_column, 16);
  std::memcpy(&d, in + 3 * in_column, 16);
  const Lanes4 ab_low = pick<0, 4, 1, 5>(a, b);
  const Lanes4 ab_high = pick<2, 6, 3, 7>(a, b);
  const Lanes4 cd_low = pick<0, 4, 1, 5>(c, d);
  const Lanes4 cd_high = pick<2, 6, 3, 7>(c, d);
  const Lanes4 rows[4] = {pick<0, 1, 4, 5>(ab_low, cd_low), pick<2, 3, 6, 7>(ab_low, cd_low),
                          pick<0, 1, 4, 5>(ab_high, cd_high), pick<2, 3, 6, 7>(ab_high, cd_high)};
  for (int64_t i = 0; i < 4; ++i) std::memcpy(out + i * out_row, &rows[i], 16);
}

template <typename W>
void transpose_tile(const W* in, int64_t in_column, W* out, int64_t out_row, int64_t rows,
                    int64_t columns) {
  int64_t i = 0;
  if constexpr (sizeof(W) == 4) {
    for (; i + 4 <= rows; i += 4) {
      int64_t j = 0;
      for (; j + 4 <= columns; j += 4) {
        transpose_4x4(in + j * in_column + i, in_column, out + i * out_row + j, out_row);
      }
      for (; j < columns; ++j) {
        for (int64_t k = i; k < i + 4; ++k) out[k * out_row + j] = in[j * in_column + k];
      }
    }
  }
  for (; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) out[i * out_row + j] = in[j * in_column + i];
  }
}

}  // namespace

StridedCopy::StridedCopy(size_t element_size, Dims dims, Dims in_strides, Dims out_strides,
                         int64_t in_offset, int64_t out_offset)
    : element_size_(element_size), in_offset_(in_offset), out_offset_(out_offset) {
  check(dims.size() == in_strides.size() && dims.size() == out_strides.size(),
        "one stride per axis");
  if (num_elements(dims) == 0) return;

  // Axes of extent 1 go; neighbours that step through both sides as one axis become one.
  for (size_t k = 0; k < dims.size(); ++k) {
    if (dims[k] == 1) continue;
    if (out_strides[k] < 0) {
      in_offset_ += (dims[k] - 1) * in_strides[k];
      out_offset_ += (dims[k] - 1) * out_strides[k];
      in_strides[k] = -in_strides[k];
      out_strides[k] = -out_strides[k];
    }
    if (!outer_dims_.empty() && outer_in_.back() == in_strides[k] * dims[k] &&
        outer_out_.back() == out_strides[k] * dims[k]) {
      outer_dims_.back() *= dims[k];
      outer_in_.back() = in_strides[k];
      outer_out_.back() = out_strides[k];
    } else {
      outer_dims_.push_back(dims[k]);
      outer_in_.push_back(in_strides[k]);
      outer_out_.push_back(out_strides[k]);
    }
  }
  if (outer_dims_.size() > static_cast<size_t>(kMaxAxes)) {
    throw UnsupportedError(str("copies of more than ", kMaxAxes, " separate axes"));
  }
  kind_ = Kind::rows;
  if (!outer_dims_.empty()) {
    columns_ = outer_dims_.back();
    in_column_ = outer_in_.back();
    out_column_ = outer_out_.back();
    const auto take = [this](size_t axis) {
      const auto at = static_cast<std::ptrdiff_t>(axis);
      outer_dims_.erase(outer_dims_.begin() + at);
      outer_in_.erase(outer_in_.begin() + at);
      outer_out_.erase(outer_out_.begin() + at);
    };
    take(outer_dims_.size() - 1);
    if (out_column_ != 1) {
      kind_ = Kind::strided;
    } else if (in_column_ == 0) {
      kind_ = Kind::fill;
    } else if (in_column_ != 1) {
      kind_ = Kind::strided;
      for (size_t k = 0; k < outer_dims_.size(); ++k) {
        if (outer_in_[k] != 1) continue;
        kind_ = Kind::transpose;
        rows_ = outer_dims_[k];
        in_row_ = 1;
        out_row_ = outer_out_[k];
        take(k);
        break;
      }
    }
  }
  outer_count_ = num_elements(outer_dims_);
}

template <typename Body>
void StridedCopy::for_each_outer(int64_t begin, int64_t end, const Body& body) const {
  const int64_t axes = static_cast<int64_t>(outer_dims_.size());
  int64_t index[kMaxAxes];
  int64_t in = in_offset_, out = out_offset_, rest = begin;
  for (int64_t k = axes; k-- > 0;) {
    const size_t axis = static_cast<size_t>(k);
    index[k] = rest % outer_dims_[axis];
    rest /= outer_dims_[axis];
    in += index[k] * outer_in_[axis];
    out += index[k] * outer_out_[axis];
  }
  for (int64_t i = begin; i < end; ++i) {
    body(in, out);
    for (int64_t k = axes; k-- > 0;) {
      const size_t axis = static_cast<size_t>(k);
      in += outer_in_[axis];
      out += outer_out_[axis];
      if (++index[k] < outer_dims_[axis]) break;
      in -= outer_dims_[axis] * outer_in_[axis];
      out -= outer_dims_[axis] * outer_out_[axis];
      index[k] = 0;
    }
  }
}

template <size_t kSize>
void StridedCopy::run_sized(const std::byte* in_bytes, std::byte* out_bytes) const {
  using W = typename Word<kSize>::type;
  const W* in = reinterpret_cast<const W*>(in_bytes);
  W* out = reinterpret_cast<W*>(out_bytes);
  constexpr int64_t size = static_cast<int64_t>(kSize);
  if (kind_ == Kind::transpose) {
    const int64_t bands = (rows_ + kTile - 1) / kTile;
    const int64_t band_bytes = std::min(rows_, kTile) * columns_ * size;
    parallel_for(outer_count_ * bands, std::max<int64_t>(1, kGrainBytes / band_bytes),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t unit = begin; unit < end; ++unit) {
                     const int64_t row = unit % bands * kTile;
                     const int64_t rows = std::min(kTile, rows_ - row);
                     for_each_outer(unit / bands, unit / bands + 1, [&](int64_t from, int64_t to) {
                       for (int64_t j = 0; j < columns_; j += kTile) {
                         transpose_tile<W>(in + from + row + j * in_column_, in_column_,
                                           out + to + row * out_row_ + j, out_row_, rows,
                                           std::min(kTile, columns_ - j));
                       }
                     });
                   }
                 });
    return;
  }
  if (outer_count_ == 1 && (kind_ == Kind::rows || kind_ == Kind::fill)) {
    parallel_for(columns_, kGrainBytes / size, [&](int64_t begin, int64_t end) {
      if (kind_ == Kind::rows) {
        std::memcpy(out + out_offset_ + begin, in + in_offset_ + begin,
                    static_cast<size_t>(end - begin) * kSize);
      } else {
        std::fill(out + out_offset_ + begin, out + out_offset_ + end, in[in_offset_]);
      }
    });
    return;
  }
  const int64_t row_bytes = columns_ * size;
  parallel_for(outer_count_, std::max<int64_t>(1, kGrainBytes / row_bytes),
               [&](int64_t begin, int64_t end) {
                 for_each_outer(begin, end, [&](int64_t from, int64_t to) {
                   if (kind_ == Kind::fill) {
                     std::fill(out + to, out + to + columns_, in[from]);
                   } else if (kind_ == Kind::rows && row_bytes > 64) {
                     std::memcpy(out + to, in + from, static_cast<size_t>(row_bytes));
                   } else {
                     for (int64_t j = 0; j < columns_; ++j) {
                       out[to + j * out_column_] = in[from + j * in_column_];
                     }
                   }
                 });
               });
}

void StridedCopy::run(const void* in, void* out) const {
  if (kind_ == Kind::empty) return;
  const std::byte* from = static_cast<const std::byte*>(in);
  std::byte* to = static_cast<std::byte*>(out);
  switch (element_size_) {
    case 1:
      return run_sized<1>(from, to);
    case 2:
      return run_sized<2>(from, to);
    case 4:
      return run_sized<4>(from, to);
    case 8:
      return run_sized<8>(from, to);
    default:
      check(false, "elements have 1, 2, 4 or 8 bytes");
  }
}

namespace {

template <size_t kSize>
void fill_sized(void* out, int64_t count, const void* element) {
  using W = typename Word<kSize>::type;
  W value;
  std::memcpy(&value, element, kSize);
  W* words = static_cast<W*>(out);
  parallel_for(count, kGrainBytes / static_cast<int64_t>(kSize),
               [&](int64_t begin, int64_t end) { std::fill(words + begin, words + end, value); });
}

}  // namespace

void fill_elements(void* out, int64_t count, size_t element_size, const void* element) {
  switch (element_size) {
    case 1:
      return fill_sized<1>(out, count, element);
    case 2:
      return fill_sized<2>(out, count, element);
    case 4:
      return fill_sized<4>(out, count, element);
    case 8:
      return fill_sized<8>(out, count, element);
    default:
      check(false, "elements have 1, 2, 4 or 8 bytes");
  }
}

}  // namespace ortrain::cpu
