// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/padded_copy.h"
#include "ortrain/gpu/words.h"

namespace ortrain::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;  // words of 16 bytes
constexpr int64_t kPerBlock = int64_t{kThreads} * kPerThread;
constexpr int kWordBytes = 16;

struct Words {
  PaddedCopy shape;
  Divider in_row;   // words that a row is written in, at most
  Divider in_rows;  // rows of a matrix
  int64_t all;
  uintptr_t begin, end;  // of what may be read
};

// 16 bytes from any multiple of 2. All of them belong to what may be read, so that the aligned
// words around them are read instead where these do, too.
template <int kSize>
ORTRAIN_DEVICE typename WordOf<kWordBytes>::type load_anywhere(const Words& a, const char* from) {
  constexpr int kHalf = kWordBytes / 4;
  const auto address = reinterpret_cast<uintptr_t>(from);
  const auto shift = static_cast<unsigned>(address % kWordBytes);
  typename WordOf<kWordBytes>::type word;
  if (shift == 0) return load_word<kWordBytes>(from);
  const char* const low = from - shift;
  if (address - shift < a.begin || address - shift + 2 * kWordBytes > a.end) {
    typename WordOf<kSize>::type elements[kWordBytes / kSize];
    ORTRAIN_UNROLL
    for (int i = 0; i < kWordBytes / kSize; ++i) elements[i] = load_word<kSize>(from + i * kSize);
    __builtin_memcpy(&word, elements, sizeof(word));
    return word;
  }
  uint32_t parts[2 * kHalf];
  const auto first = load_word<kWordBytes>(low), second = load_word<kWordBytes>(low + kWordBytes);
  __builtin_memcpy(parts, &first, sizeof(first));
  __builtin_memcpy(parts + kHalf, &second, sizeof(second));
  // Without an index that only the device knows, so that all stays in registers.
  if ((shift & 8u) != 0) {
    ORTRAIN_UNROLL
    for (int i = 0; i < kHalf + 2; ++i) parts[i] = parts[i + 2];
  }
  if ((shift & 4u) != 0) {
    ORTRAIN_UNROLL
    for (int i = 0; i < kHalf + 1; ++i) parts[i] = parts[i + 1];
  }
  const unsigned bits = (shift & 2u) * 8;
  ORTRAIN_UNROLL
  for (int i = 0; i < kHalf; ++i) {
    parts[i] = static_cast<uint32_t>(((uint64_t{parts[i + 1]} << 32) | parts[i]) >> bits);
  }
  __builtin_memcpy(&word, parts, sizeof(word));
  return word;
}

// Word `at` of a row that is written, which covers the columns [column, column + kWidth).
template <int kSize>
ORTRAIN_DEVICE void copy_word(const Words& a, int64_t matrix, int64_t row, int64_t at,
                              const char* from, char* to) {
  constexpr int kWidth = kWordBytes / kSize;
  const PaddedCopy& p = a.shape;
  char* const to_row = to + (matrix * p.to_stride + row * p.to_ld) * kSize;
  const char* const from_row = from + (matrix * p.from_stride + row * p.from_ld) * kSize;
  const auto before =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(to_row) % kWordBytes / kSize);
  const int64_t column = at * kWidth - before;
  if (column >= p.columns) return;
  const int64_t known = row < p.from_rows ? p.from_columns : 0;
  if (column >= 0 && column + kWidth <= p.columns) {
    typename WordOf<kWordBytes>::type word;
    if (column + kWidth <= known) {
      word = load_anywhere<kSize>(a, from_row + column * kSize);
    } else {
      typename WordOf<kSize>::type elements[kWidth];
      ORTRAIN_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        elements[i] = 0;
        if (column + i < known) elements[i] = load_word<kSize>(from_row + (column + i) * kSize);
      }
      __builtin_memcpy(&word, elements, sizeof(word));
    }
    *reinterpret_cast<typename WordOf<kWordBytes>::type*>(to_row + column * kSize) = word;
    return;
  }
  for (int64_t k = column < 0 ? 0 : column; k < column + kWidth && k < p.columns; ++k) {
    typename WordOf<kSize>::type element = 0;
    if (k < known) element = load_word<kSize>(from_row + k * kSize);
    *reinterpret_cast<typename WordOf<kSize>::type*>(to_row + k * kSize) = element;
  }
}

template <int kSize, class Index>
__global__ void __launch_bounds__(kThreads) copy_padded_words(Words a, const char* from, char* to) {
  ORTRAIN_UNROLL
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = blockIdx.x * kPerBlock + k * kThreads + threadIdx.x;
    if (i >= a.all) return;
    const Index line = a.in_row.divide(static_cast<Index>(i));
    const Index matrix = a.in_rows.divide(line);
    copy_word<kSize>(a, matrix, line - static_cast<int64_t>(matrix) * a.shape.rows,
                     i - static_cast<int64_t>(line) * a.in_row.divisor, from, to);
  }
}

}  // namespace

void copy_padded(const PaddedCopy& copy, size_t element_size, const void* from, void* to,
                 void* stream) {
  if (copy.count * copy.rows * copy.columns == 0) return;
  const auto size = static_cast<int64_t>(element_size);
  check(size == 2 || size == 4, "elements of 2 or 4 bytes");
  // Of rows that all begin at whole words; others may begin in the middle of one more.
  const bool whole =
      common_word({copy.to_ld * size, copy.to_stride * size}, word_of_address(to)) == kWordBytes;
  const int64_t in_row =
      (copy.columns * size + kWordBytes - 1) / kWordBytes + static_cast<int64_t>(!whole);
  const int64_t last =
      (copy.count - 1) * copy.from_stride + (copy.from_rows - 1) * copy.from_ld + copy.from_columns;
  const auto begin = reinterpret_cast<uintptr_t>(from);
  const Words words{.shape = copy,
                    .in_row = Divider(in_row),
                    .in_rows = Divider(copy.rows),
                    .all = copy.count * copy.rows * in_row,
                    .begin = begin,
                    .end = begin + static_cast<uintptr_t>(std::max<int64_t>(last, 0) * size)};
  const LaunchShape shape{.blocks = block_count((words.all + kPerBlock - 1) / kPerBlock),
                          .threads = kThreads};
  dispatch_width(words.all, [&](auto index) {
    using Index = decltype(index);
    const auto put = [&](auto kernel) {
      launch(kernel, shape, stream, words, static_cast<const char*>(from), static_cast<char*>(to));
    };
    size == 2 ? put(copy_padded_words<2, Index>) : put(copy_padded_words<4, Index>);
  });
}

}  // namespace ortrain::gpu
