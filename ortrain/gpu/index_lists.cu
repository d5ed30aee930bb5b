// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/index_lists.h"
#include "ortrain/gpu/index_sort.h"
#include "ortrain/gpu/strided_copy.h"
#include "ortrain/gpu/words.h"

namespace ortrain::gpu {
namespace {

constexpr int kThreads = 256;
// Longer lists are joined in parts, those of as many positions in the order of the lists.
constexpr int kPart = 128;

// NaN wins a maximum or minimum; integers wrap.
template <class C>
ORTRAIN_DEVICE C combine(Reduction reduction, C a, C b) {
  switch (reduction) {
    case Reduction::none:
      return b;
    case Reduction::add:
      if constexpr (std::is_integral_v<C> && !std::is_same_v<C, bool>) {
        return static_cast<C>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
      } else {
        return static_cast<C>(a + b);
      }
    case Reduction::mul:
      if constexpr (std::is_integral_v<C> && !std::is_same_v<C, bool>) {
        return static_cast<C>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
      } else {
        return static_cast<C>(a * b);
      }
    case Reduction::max:
      return b > a || b != b ? b : a;
    case Reduction::min:
      return b < a || b != b ? b : a;
  }
  return b;
}

// A block has rows x groups x columns of threads, all powers of two: the groups share what is
// joined for a row.
struct Team {
  int columns, groups, rows;
  int64_t column_blocks;
};

// Where a thread of a team works.
struct Place {
  ORTRAIN_DEVICE Place(const Team& team, int vector)
      : group(static_cast<int>(threadIdx.x) / team.columns % team.groups) {
    const int64_t row_block = blockIdx.x / team.column_blocks;
    const int64_t column_block = blockIdx.x - row_block * team.column_blocks;
    row = row_block * team.rows + static_cast<int>(threadIdx.x) / (team.columns * team.groups);
    column = (column_block * team.columns + static_cast<int>(threadIdx.x) % team.columns) * vector;
  }
  int group;
  int64_t row, column;
};

template <int kVector, class T>
ORTRAIN_DEVICE Vector<T, kVector> load_row(const T* from) {
  if constexpr (kVector * sizeof(T) <= 16) {
    return load_vector<kVector>(from);
  } else {
    Vector<T, kVector> values;
    ORTRAIN_UNROLL
    for (int k = 0; k < kVector; ++k) values[k] = from[k];
    return values;
  }
}

// Joins `count` rows, of which address_of(i) is the i-th; the result is that of group 0. All
// threads of the block take part, some with a count of 0.
template <int kVector, class C, class AddressOf>
ORTRAIN_DEVICE void join_rows(C (&joined)[kVector], const Team& team, int group, int64_t count,
                              Reduction reduction, const AddressOf& address_of) {
  __shared__ C shared[kThreads * kVector];
  for (int k = 0; k < kVector; ++k) joined[k] = C{0};
#pragma unroll 4
  for (int64_t i = group; i < count; i += team.groups) {
    const auto values = load_row<kVector>(address_of(i));
    for (int k = 0; k < kVector; ++k) {
      const C value = static_cast<C>(values[k]);
      joined[k] = i < team.groups ? value : combine(reduction, joined[k], value);
    }
  }
  for (int k = 0; k < kVector; ++k) shared[k * kThreads + threadIdx.x] = joined[k];
  __syncthreads();
  if (group == 0) {
    for (int k = 0; k < kVector; ++k) {
      for (int g = 1; g < team.groups && g < count; ++g) {
        const C other = shared[k * kThreads + threadIdx.x + g * team.columns];
        joined[k] = combine(reduction, joined[k], other);
      }
    }
  }
  __syncthreads();
}

// What is joined of parts: [outer][part][2][inner]. A part holds pieces of two long lists at most,
// the first of which begins with the part or before it.
template <class C>
struct Pieces {
  C* values;  // null: no list is longer than a part
  int64_t parts;

  ORTRAIN_DEVICE bool has(int32_t begin, int32_t end) const {
    return values != nullptr && end - begin > kPart;
  }
  ORTRAIN_DEVICE C* at(int64_t outer, int64_t part, bool begins_inside, int64_t inner) const {
    return values + ((outer * parts + part) * 2 + (begins_inside ? 1 : 0)) * inner;
  }
};

// A row of the launch is a piece.
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads)
    join_pieces(IndexLists lists, ListShape shape, Team team, Reduction reduction, const T* updates,
                Pieces<ComputeType<T>> pieces) {
  using C = ComputeType<T>;
  const Place place(team, kVector);
  const bool inner_list = place.row % 2 != 0;
  const int64_t part = place.row / 2 % pieces.parts;
  const int64_t outer = place.row / 2 / pieces.parts;
  const int64_t first = part * kPart;
  const int32_t all = lists.starts[shape.targets];
  int64_t from = 0, to = 0;
  if (outer < shape.outer && place.column < shape.inner && first < all) {
    const int64_t last = first + kPart < all ? first + kPart : all;
    // The list of the part's first or last position.
    const int32_t target = lists.targets[lists.positions[inner_list ? last - 1 : first]];
    const int32_t begin = lists.starts[target], end = lists.starts[target + 1];
    if (pieces.has(begin, end) && (begin > first) == inner_list) {
      from = begin > first ? begin : first;
      to = end < last ? end : last;
    }
  }
  const T* const row = updates + outer * shape.positions * shape.inner + place.column;
  C joined[kVector];
  join_rows<kVector>(joined, team, place.group, to - from, reduction,
                     [&](int64_t i) { return row + lists.positions[from + i] * shape.inner; });
  if (from == to || place.group != 0) return;
  C* const out = pieces.at(outer, part, inner_list, shape.inner) + place.column;
  for (int k = 0; k < kVector; ++k) out[k] = joined[k];
}

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads)
    join_lists(IndexLists lists, ListShape shape, Team team, Reduction reduction, const T* base,
               const T* updates, T* out, Pieces<ComputeType<T>> pieces) {
  using C = ComputeType<T>;
  const Place place(team, kVector);
  const int64_t outer = place.row / shape.targets;
  const int64_t target = place.row - outer * shape.targets;
  const bool inside = outer < shape.outer && place.column < shape.inner;
  const int32_t begin = inside ? lists.starts[target] : 0;
  const int32_t end = inside ? lists.starts[target + 1] : 0;
  const bool in_pieces = pieces.has(begin, end);
  C joined[kVector];
  const T* const row = updates + outer * shape.positions * shape.inner + place.column;
  join_rows<kVector>(joined, team, place.group, in_pieces ? 0 : end - begin, reduction,
                     [&](int64_t i) { return row + lists.positions[begin + i] * shape.inner; });
  if (pieces.values != nullptr) {
    C of_pieces[kVector];
    const int64_t first = begin / kPart;
    join_rows<kVector>(of_pieces, team, place.group, in_pieces ? (end - 1) / kPart - first + 1 : 0,
                       reduction, [&](int64_t i) {
                         const bool begins_inside = i == 0 && begin % kPart != 0;
                         return pieces.at(outer, first + i, begins_inside, shape.inner) +
                                place.column;
                       });
    if (in_pieces) {
      for (int k = 0; k < kVector; ++k) joined[k] = of_pieces[k];
    }
  }
  if (!inside || place.group != 0) return;
  const int64_t at = place.row * shape.inner + place.column;
  if (begin == end && base == out) return;
  Vector<T, kVector> result = {};
  if (base != nullptr) result = load_vector<kVector>(base + at);
  if (begin != end) {
    for (int k = 0; k < kVector; ++k) {
      result[k] = static_cast<T>(
          base == nullptr ? joined[k] : combine(reduction, static_cast<C>(result[k]), joined[k]));
    }
  }
  store_vector<kVector>(out + at, result);
}

template <int kSize>
__global__ void __launch_bounds__(kItemThreads)
    write_last(TargetSink sink, int64_t count, int64_t inner, const void* from_address,
               void* to_address) {
  using Word = typename WordOf<kSize>::type;
  const Word* from = static_cast<const Word*>(from_address);
  Word* to = static_cast<Word*>(to_address);
  for_each_item(count, [&](int64_t i) {
    const int64_t position = i / inner;
    const int32_t target = sink.targets[position];
    if (target < 0 || sink.counts[target] != static_cast<int32_t>(position)) return;
    to[target * inner + (i - position * inner)] = from[i];
  });
}

Team team_of(int64_t columns) {
  Team team{1, 1, 1, 1};
  while (team.columns < kThreads && team.columns < columns) team.columns *= 2;
  // Lists are often long where there are more positions than targets, and some always may be.
  while (team.groups < 8 && team.columns * team.groups < kThreads) team.groups *= 2;
  team.rows = kThreads / (team.columns * team.groups);
  team.column_blocks = (columns + team.columns - 1) / team.columns;
  return team;
}

LaunchShape shape_of(const Team& team, int64_t rows) {
  const int64_t blocks = (rows + team.rows - 1) / team.rows * team.column_blocks;
  check(!needs_wide(blocks), "the blocks of a launch are below 2^31");
  return {.blocks = block_count(blocks), .threads = kThreads};
}

int64_t parts_of(const ListShape& shape) {
  return shape.positions > kPart ? (shape.positions + kPart - 1) / kPart : 0;
}

template <class T, int kVector>
void launch_join(const IndexLists& lists, const ListShape& shape, Reduction reduction,
                 const void* base, const void* updates, void* out, void* workspace, void* stream) {
  const Team team = team_of(shape.inner / kVector);
  const auto* const from = static_cast<const T*>(updates);
  Pieces<ComputeType<T>> pieces{nullptr, parts_of(shape)};
  if (pieces.parts > 0) {
    pieces.values = static_cast<ComputeType<T>*>(workspace);
    launch(join_pieces<T, kVector>, shape_of(team, shape.outer * pieces.parts * 2), stream, lists,
           shape, team, reduction, from, pieces);
  }
  launch(join_lists<T, kVector>, shape_of(team, shape.outer * shape.targets), stream, lists, shape,
         team, reduction, static_cast<const T*>(base), from, static_cast<T*>(out), pieces);
}

// Everything of the lists, one array behind the other; `rest` is the sums', then the sort's.
struct Arrays {
  int32_t *targets, *counts, *starts, *sorted, *rest;
  Arrays(void* workspace, const ListShape& shape) {
    targets = static_cast<int32_t*>(workspace);
    counts = targets + shape.positions;
    starts = counts + shape.targets;
    sorted = starts + shape.targets + 1;
    rest = sorted + shape.positions;
  }
};

// The pieces lie behind them.
ByteCount bytes_of_lists(const ListShape& shape) {
  const ByteCount arrays = bytes_of<int32_t>(2, shape.positions) +
                           bytes_of<int32_t>(2, shape.targets) + bytes_of<int32_t>(1);
  const ByteCount rest = std::max(PrefixSums(shape.targets).workspace_bytes(),
                                  IndexSort(shape.positions, shape.targets).workspace_bytes());
  return (arrays + rest).rounded_up(alignof(std::max_align_t));
}

}  // namespace

ByteCount piece_bytes(DType dtype, const ListShape& shape) {
  return dispatch_all(dtype, [&](auto tag) {
    using C = ComputeType<typename decltype(tag)::type>;
    return bytes_of<C>(2, shape.outer, parts_of(shape), shape.inner);
  });
}

void apply_lists(DType dtype, const IndexLists& lists, const ListShape& shape, Reduction reduction,
                 const void* base, const void* updates, void* out, void* pieces, void* stream) {
  if (shape.outer * shape.targets * shape.inner == 0) return;
  dispatch_all(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_integral_v<T>) {
      constexpr int kVector = 16 / static_cast<int>(sizeof(T));
      int aligned = word_of_address(updates, word_of_address(out));
      if (base != nullptr) aligned = word_of_address(base, aligned);
      if (shape.inner % kVector == 0 && aligned == 16) {
        launch_join<T, kVector>(lists, shape, reduction, base, updates, out, pieces, stream);
        return;
      }
    }
    launch_join<T, 1>(lists, shape, reduction, base, updates, out, pieces, stream);
  });
}

std::optional<std::string> JoinByIndex::refusal(int64_t positions, int64_t targets) {
  if (needs_wide(positions) || needs_wide(targets)) return "2^31 indices or targets or more";
  return std::nullopt;
}

ByteCount JoinByIndex::workspace_bytes() const {
  return bytes_of_lists(shape_) + piece_bytes(dtype_, shape_);
}

TargetSink JoinByIndex::begin(void* workspace, void* stream) const {
  const Arrays arrays(workspace, shape_);
  fill_elements(arrays.counts, shape_.targets, sizeof(int32_t), 0, stream);
  return {arrays.targets, arrays.counts};
}

void JoinByIndex::finish(Reduction reduction, const void* base, const void* updates, void* out,
                         void* workspace, void* stream) const {
  if (shape_.outer * shape_.targets * shape_.inner == 0) return;
  const Arrays arrays(workspace, shape_);
  PrefixSums(shape_.targets).run(arrays.counts, arrays.starts, arrays.rest, stream);
  IndexSort(shape_.positions, shape_.targets)
      .run(arrays.targets, arrays.sorted, arrays.rest, stream);
  apply_lists(dtype_, {arrays.starts, arrays.sorted, arrays.targets}, shape_, reduction, base,
              updates, out, static_cast<char*>(workspace) + bytes_of_lists(shape_).value(), stream);
}

TargetSink LastPositions::begin(void* workspace, void* stream) const {
  auto* const targets = static_cast<int32_t*>(workspace);
  fill_elements(targets + positions_, targets_, sizeof(int32_t), 0xffffffffu, stream);
  return {targets, targets + positions_, true};
}

void apply_last(size_t element_size, const TargetSink& sink, const ListShape& shape,
                const void* updates, void* out, void* stream) {
  const int64_t row = shape.inner * static_cast<int64_t>(element_size);
  const int word = word_of_address(updates, word_of_address(out, common_word({row})));
  const int64_t inner = row / word;
  const int64_t count = shape.positions * inner;
  dispatch_word(word, [&](auto bytes) {
    launch(write_last<decltype(bytes)::value>, items(count), stream, sink, count, inner, updates,
           out);
  });
}

}  // namespace ortrain::gpu
