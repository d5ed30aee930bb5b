// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "ortrain/gpu/copy_parts.h"
#include "ortrain/gpu/words.h"

namespace ortrain::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;
constexpr int64_t kPerBlock = int64_t{kThreads} * kPerThread;

// In words.
struct KernelPart {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t words = 0;                 // in all
  Divider row;                       // words of one row
  int64_t from_row = 0, to_row = 0;  // steps between rows
  uint32_t first_block = 0;
};

constexpr int kParts = 56;  // arguments of a kernel may take 4 KiB
using KernelParts = DeviceArray<KernelPart, kParts>;
static_assert(sizeof(KernelParts) <= 4000);

template <int kWord, class Index>
__global__ void __launch_bounds__(kThreads) copy_parts(KernelParts parts, int count) {
  using Word = typename WordOf<kWord>::type;
  const KernelPart& part = of_this_block(parts, count);
  const Word* from = static_cast<const Word*>(part.from);
  Word* to = static_cast<Word*>(part.to);
  const int64_t first = int64_t{blockIdx.x - part.first_block} * kPerBlock + threadIdx.x;
  // All loads are under way before the first store waits for one.
  Word words[kPerThread];
  int64_t places[kPerThread];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = first + k * kThreads;
    if (i >= part.words) continue;
    const int64_t row = part.row.divide(static_cast<Index>(i));
    const int64_t at = i - row * part.row.divisor;
    words[k] = from[row * part.from_row + at];
    places[k] = row * part.to_row + at;
  }
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    if (first + k * kThreads < part.words) to[places[k]] = words[k];
  }
}

// `rows` rows of `bytes`, and the steps between them, all in bytes.
struct Rows {
  const void* from;
  void* to;
  int64_t rows, bytes, from_row, to_row;
};

void copy_rows(std::span<const Rows> all, void* stream) {
  for (size_t begin = 0; begin < all.size();) {
    // One word for all parts of a launch.
    size_t end = begin;
    int word = 16;
    int64_t most = 0;
    for (; end < all.size() && end - begin < static_cast<size_t>(kParts); ++end) {
      const Rows& rows = all[end];
      word = word_of_address(rows.from, word_of_address(rows.to, word));
      word = common_word({rows.bytes, rows.from_row, rows.to_row}, word);
      most = std::max(most, rows.rows * rows.bytes);
    }
    KernelParts parts;
    int64_t blocks = 0;
    int count = 0;
    for (; begin < end; ++begin) {
      const Rows& rows = all[begin];
      const int64_t words = rows.rows * rows.bytes / word;
      const int64_t needed = (words + kPerBlock - 1) / kPerBlock;
      if (blocks + needed > std::numeric_limits<int32_t>::max()) {
        check(count > 0, "a part fits a launch");
        break;
      }
      parts[count++] = {rows.from,
                        rows.to,
                        words,
                        Divider(rows.bytes / word),
                        rows.from_row / word,
                        rows.to_row / word,
                        static_cast<uint32_t>(blocks)};
      blocks += needed;
    }
    const LaunchShape shape{.blocks = block_count(blocks), .threads = kThreads};
    dispatch_width(most / word, [&](auto index) {
      dispatch_word(word, [&](auto bytes) {
        launch(copy_parts<decltype(bytes)::value, decltype(index)>, shape, stream, parts, count);
      });
    });
  }
}

template <class Make>
void for_chunks(size_t count, void* stream, const Make& make) {
  std::array<Rows, kParts> rows;
  size_t used = 0;
  for (size_t i = 0; i < count; ++i) {
    const Rows next = make(i);
    if (next.rows * next.bytes == 0 || next.from == next.to) continue;
    rows[used++] = next;
    if (used == rows.size()) {
      copy_rows({rows.data(), used}, stream);
      used = 0;
    }
  }
  copy_rows({rows.data(), used}, stream);
}

}  // namespace

void join_parts(std::span<const Part> parts, void* whole, int64_t rows, int64_t row_bytes,
                void* stream) {
  for_chunks(parts.size(), stream, [&](size_t i) -> Rows {
    const Part& part = parts[i];
    return {part.data, static_cast<char*>(whole) + part.offset, rows, part.bytes, part.bytes,
            row_bytes};
  });
}

void cut_parts(std::span<const Part> parts, const void* whole, int64_t rows, int64_t row_bytes,
               void* stream) {
  for_chunks(parts.size(), stream, [&](size_t i) -> Rows {
    const Part& part = parts[i];
    return {static_cast<const char*>(whole) + part.offset,
            const_cast<void*>(part.data),
            rows,
            part.bytes,
            row_bytes,
            part.bytes};
  });
}

void copy_all(std::span<const Move> moves, void* stream) {
  for_chunks(moves.size(), stream, [&](size_t i) -> Rows {
    return {moves[i].from, moves[i].to, 1, moves[i].bytes, moves[i].bytes, moves[i].bytes};
  });
}

}  // namespace ortrain::gpu
