// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>

#include "ortrain/gpu/strided_copy.h"

namespace ortrain::gpu {
namespace {

// A matrix with fewer rows or columns fills too little of a tile.
constexpr int64_t kLeastSide = 16;
constexpr int kTileThreads = 256;

template <int kWord, class Index>
__global__ void __launch_bounds__(kItemThreads)
    copy_words(CopyAxes axes, int64_t count, const void* in_address, void* out_address) {
  using Word = typename WordOf<kWord>::type;
  const Word* in = static_cast<const Word*>(in_address);
  Word* out = static_cast<Word*>(out_address);
  for_each_item(count, [&](int64_t i) {
    int64_t from = 0, to = 0;
    axes.locate(static_cast<Index>(i), from, to);
    out[to] = in[from];
  });
}

// Every element of the input becomes a word of copies: steps of the input count elements, those of
// the output words.
template <int kWord, int kElement, class Index>
__global__ void __launch_bounds__(kItemThreads)
    splat_words(CopyAxes axes, int64_t count, const void* in_address, void* out_address) {
  using Word = typename WordOf<kWord>::type;
  using Element = typename WordOf<kElement>::type;
  const Element* in = static_cast<const Element*>(in_address);
  Word* out = static_cast<Word*>(out_address);
  for_each_item(count, [&](int64_t i) {
    int64_t from = 0, to = 0;
    axes.locate(static_cast<Index>(i), from, to);
    out[to] = splat<kWord, kElement>(in[from]);
  });
}

struct MatrixCopy {
  CopyAxes outer;
  int64_t rows, columns, in_column, out_row;
  int64_t row_tiles, column_tiles, tiles;
};

template <int kSize>
constexpr int tile_side() {
  return kSize == 8 ? 32 : 64;
}

// kVector neighbours move at a time, on both sides of the shared memory.
template <int kSize, int kVector>
__global__ void __launch_bounds__(kTileThreads)
    transpose_tiles(MatrixCopy m, const void* in_address, void* out_address) {
  using Element = typename WordOf<kSize>::type;
  using Word = typename WordOf<kSize * kVector>::type;
  constexpr int kTile = tile_side<kSize>();
  constexpr int kPad = kSize < 4 ? 4 / kSize : 1;  // a bank
  constexpr int kPerLine = kTile / kVector;
  constexpr int kLines = kTileThreads / kPerLine;
  __shared__ Element tile[kTile * (kTile + kPad)];
  const Element* in = static_cast<const Element*>(in_address);
  Element* out = static_cast<Element*>(out_address);
  const int along = static_cast<int>(threadIdx.x) % kPerLine * kVector;
  const int across = static_cast<int>(threadIdx.x) / kPerLine;
  for (int64_t t = blockIdx.x; t < m.tiles; t += gridDim.x) {
    const int64_t band = t / m.column_tiles;
    const int64_t column0 = (t - band * m.column_tiles) * kTile;
    const int64_t matrix = band / m.row_tiles;
    const int64_t row0 = (band - matrix * m.row_tiles) * kTile;
    int64_t from = 0, to = 0;
    m.outer.locate(matrix, from, to);
    if (row0 + along < m.rows) {
      const Element* line = in + from + row0 + along;
#pragma unroll
      for (int c = 0; c < kTile; c += kLines) {
        const int64_t column = column0 + c + across;
        if (column >= m.columns) continue;
        const Word word = load_word<kSize * kVector>(line + column * m.in_column);
        __builtin_memcpy(&tile[(c + across) * (kTile + kPad) + along], &word, sizeof(word));
      }
    }
    __syncthreads();
    if (column0 + along < m.columns) {
      Element* line = out + to + column0 + along;
#pragma unroll
      for (int r = 0; r < kTile; r += kLines) {
        const int64_t row = row0 + r + across;
        if (row >= m.rows) continue;
        Element gathered[kVector];
        for (int k = 0; k < kVector; ++k) {
          gathered[k] = tile[(along + k) * (kTile + kPad) + r + across];
        }
        Word word;
        __builtin_memcpy(&word, gathered, sizeof(word));
        *reinterpret_cast<Word*>(line + row * m.out_row) = word;
      }
    }
    __syncthreads();
  }
}

template <int kWord>
__global__ void __launch_bounds__(kItemThreads)
    fill_words(int64_t count, typename WordOf<8>::type bits, void* address) {
  using Word = typename WordOf<kWord>::type;
  Word* out = static_cast<Word*>(address);
  typename WordOf<8>::type wide = bits;
  Word word;
  for (int i = 0; i < kWord; i += 8) {
    __builtin_memcpy(reinterpret_cast<unsigned char*>(&word) + i, &wide, kWord < 8 ? kWord : 8);
  }
  for_each_item(count, [&](int64_t i) { out[i] = word; });
}

CopyAxes kernel_axes(const Dims& dims, const Dims& in, const Dims& out) {
  if (dims.size() > static_cast<size_t>(CopyAxes::kMost)) {
    throw UnsupportedError(str("copies of more than ", CopyAxes::kMost, " separate axes"));
  }
  CopyAxes axes;
  for (size_t k = 0; k < dims.size(); ++k) {
    axes.axes[axes.count++] = {Divider(dims[k]), in[k], out[k]};
  }
  return axes;
}

// The widest word that the steps of the outer axes and the offsets are multiples of.
int widest_word(const MergedAxes& merged, int64_t size, bool of_input) {
  int word = 16;
  const auto narrow = [&](int64_t elements) { word = common_word({elements * size}, word); };
  narrow(merged.dims.back());
  if (of_input) narrow(merged.in_offset);
  narrow(merged.out_offset);
  for (size_t k = 0; k + 1 < merged.dims.size(); ++k) {
    if (of_input) narrow(merged.in[k]);
    narrow(merged.out[k]);
  }
  return word;
}

}  // namespace

MergedAxes::MergedAxes(const Dims& all_dims, const Dims& in_strides, const Dims& out_strides,
                       int64_t first_in, int64_t first_out)
    : in_offset(first_in), out_offset(first_out) {
  check(all_dims.size() == in_strides.size() && all_dims.size() == out_strides.size(),
        "one stride per axis");
  for (size_t k = 0; k < all_dims.size(); ++k) {
    const int64_t extent = all_dims[k];
    int64_t from = in_strides[k], to = out_strides[k];
    if (extent == 1) continue;
    if (to < 0) {
      in_offset += (extent - 1) * from;
      out_offset += (extent - 1) * to;
      from = -from;
      to = -to;
    }
    if (!dims.empty() && in.back() == from * extent && out.back() == to * extent) {
      dims.back() *= extent;
      in.back() = from;
      out.back() = to;
    } else {
      dims.push_back(extent);
      in.push_back(from);
      out.push_back(to);
    }
  }
}

CopyAxes MergedAxes::for_kernels() const { return kernel_axes(dims, in, out); }

StridedCopy::StridedCopy(size_t element_size, const Dims& dims, const Dims& in_strides,
                         const Dims& out_strides, int64_t in_offset, int64_t out_offset)
    : size_(static_cast<int>(element_size)),
      elements_(num_elements(dims)),
      merged_(dims, in_strides, out_strides, in_offset, out_offset) {
  if (elements_ == 0) return;
  if (merged_.dims.empty()) {  // a single element
    merged_.dims = merged_.in = merged_.out = {1};
  }
  axes_ = merged_.for_kernels();
  const size_t last = merged_.dims.size() - 1;
  if (merged_.out[last] != 1) return;
  if (merged_.in[last] == 1 || merged_.in[last] == 0) {
    kind_ = merged_.in[last] == 1 ? Kind::rows : Kind::fill;
    word_ = widest_word(merged_, size_, kind_ == Kind::rows);
    return;
  }
  for (size_t k = 0; k < last; ++k) {
    if (merged_.in[k] != 1 || std::min(merged_.dims[k], merged_.dims[last]) < kLeastSide) continue;
    kind_ = Kind::matrix;
    rows_ = merged_.dims[k];
    columns_ = merged_.dims[last];
    in_column_ = merged_.in[last];
    out_row_ = merged_.out[k];
    for (Dims* list : {&merged_.dims, &merged_.in, &merged_.out}) {
      list->erase(list->begin() + static_cast<std::ptrdiff_t>(last));
      list->erase(list->begin() + static_cast<std::ptrdiff_t>(k));
    }
    axes_ = merged_.for_kernels();
    vector_ = size_ == 8 ? 1 : size_ == 4 ? 2 : 4;
    const auto narrow = [&](int64_t elements) {
      while (elements % vector_ != 0) vector_ /= 2;
    };
    for (const Dims* list : {&merged_.in, &merged_.out}) {
      for (int64_t step : *list) narrow(step);
    }
    for (int64_t number :
         {rows_, columns_, in_column_, out_row_, merged_.in_offset, merged_.out_offset}) {
      narrow(number);
    }
    return;
  }
}

void StridedCopy::run_words(const void* in, void* out, void* stream) const {
  const bool fills = kind_ == Kind::fill;
  int word = size_;
  if (kind_ != Kind::strided) {
    word = word_of_address(out, std::max(word_, size_));
    if (!fills) word = word_of_address(in, word);
  }
  // Users' tensors are element-aligned.
  const int64_t ratio = word / size_;
  CopyAxes axes = axes_;
  CopyAxis& last = axes.axes[axes.count - 1];
  if (ratio > 1) {
    last.extent = Divider(last.extent.divisor / ratio);
    for (int k = 0; k + 1 < axes.count; ++k) {
      if (!fills) axes.axes[k].in /= ratio;
      axes.axes[k].out /= ratio;
    }
  }
  const auto* from = static_cast<const unsigned char*>(in) + merged_.in_offset * size_;
  auto* to = static_cast<unsigned char*>(out) + merged_.out_offset * size_;
  const int64_t count = elements_ / ratio;
  dispatch_width(count, [&](auto index) {
    using Index = decltype(index);
    dispatch_word(word, [&](auto bytes) {
      constexpr int kWord = decltype(bytes)::value;
      if (!fills || ratio == 1) {
        launch(copy_words<kWord, Index>, items(count), stream, axes, count, from, to);
        return;
      }
      dispatch_word(size_, [&](auto element) {
        constexpr int kElement = decltype(element)::value;
        if constexpr (kElement < kWord) {
          launch(splat_words<kWord, kElement, Index>, items(count), stream, axes, count, from, to);
        }
      });
    });
  });
}

void StridedCopy::run_matrix(const void* in, void* out, void* stream) const {
  const int64_t side = size_ == 8 ? tile_side<8>() : tile_side<4>();
  MatrixCopy m{axes_, rows_, columns_, in_column_, out_row_, 0, 0, 0};
  m.row_tiles = (rows_ + side - 1) / side;
  m.column_tiles = (columns_ + side - 1) / side;
  m.tiles = num_elements(merged_.dims) * m.row_tiles * m.column_tiles;
  const auto* from = static_cast<const unsigned char*>(in) + merged_.in_offset * size_;
  auto* to = static_cast<unsigned char*>(out) + merged_.out_offset * size_;
  const LaunchShape shape{.blocks = block_count(std::min<int64_t>(m.tiles, 1 << 20)),
                          .threads = kTileThreads};
  const int aligned = word_of_address(out, word_of_address(in, 16));
  const int vector = std::max(1, std::min(vector_, aligned / size_));
  const auto run = [&](auto size, auto elements) {
    launch(transpose_tiles<decltype(size)::value, decltype(elements)::value>, shape, stream, m,
           from, to);
  };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  using Four = std::integral_constant<int, 4>;
  switch (size_) {
    case 1:
      return vector == 4 ? run(One(), Four()) : run(One(), One());
    case 2:
      return vector == 4 ? run(Two(), Four()) : vector == 2 ? run(Two(), Two()) : run(Two(), One());
    case 4:
      return vector == 2 ? run(Four(), Two()) : run(Four(), One());
    default:
      return run(std::integral_constant<int, 8>(), One());
  }
}

void StridedCopy::run(const void* in, void* out, void* stream) const {
  if (elements_ == 0) return;
  if (kind_ == Kind::matrix) {
    run_matrix(in, out, stream);
  } else {
    run_words(in, out, stream);
  }
}

std::optional<std::string> refusal_of(const std::function<void()>& make) {
  try {
    make();
  } catch (const UnsupportedError& error) {
    return error.what();
  }
  return std::nullopt;
}

void fill_elements(void* out, int64_t count, size_t element_size, uint64_t bits, void* stream) {
  if (count == 0) return;
  for (size_t have = element_size; have < 8; have *= 2) {
    const uint64_t low = bits & ((uint64_t{1} << (8 * have)) - 1);
    bits = low | low << (8 * have);
  }
  const int64_t bytes = count * static_cast<int64_t>(element_size);
  dispatch_word(word_of_address(out, common_word({bytes})), [&](auto word) {
    constexpr int kWord = decltype(word)::value;
    launch(fill_words<kWord>, items(bytes / kWord), stream, bytes / kWord, bits, out);
  });
}

void copy_bytes(const void* from, void* to, int64_t bytes, void* stream) {
  if (bytes == 0 || from == to) return;
  StridedCopy(1, {bytes}, {1}, {1}).run(from, to, stream);
}

}  // namespace ortrain::gpu
