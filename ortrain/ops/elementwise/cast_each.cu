// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>

#include "ortrain/gpu/row_forms.h"
#include "ortrain/gpu/words.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;
constexpr int kParts = 96;  // arguments of a kernel may take 4 KiB

// Elements that a thread moves at a time: 16 bytes of the wider type.
template <class From, class To>
inline constexpr int kWidth = 16 / static_cast<int>(std::max(sizeof(From), sizeof(To)));
template <class From, class To>
inline constexpr int64_t kPerBlock = int64_t{kThreads} * kPerThread * kWidth<From, To>;

template <class From, class To>
struct CastPart {
  const From* from = nullptr;
  To* to = nullptr;
  int64_t count = 0;
  int64_t first_block = 0;
};

// Blocks take packs of the parts one after the other; what is left of a part, and parts at
// addresses that no pack can have, go by single elements.
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    cast_parts(DeviceArray<CastPart<From, To>, kParts> parts, int count, bool packed) {
  constexpr int kPack = kWidth<From, To>;
  const CastPart<From, To>& part = of_this_block(parts, count);
  const From* const from = part.from;
  To* const to = part.to;
  const auto cast = [](From x) {
    return static_cast<To>(static_cast<ComputeType<To>>(static_cast<ComputeType<From>>(x)));
  };
  const int64_t first =
      (blockIdx.x - part.first_block) * kPerBlock<From, To> + int64_t{threadIdx.x} * kPack;
  // All loads are under way before the first store waits for one.
  RowPack<From, kPack> packs[kPerThread];
  ORTRAIN_UNROLL
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = first + k * kThreads * kPack;
    if (packed && i + kPack <= part.count) {
      packs[k] = std::bit_cast<RowPack<From, kPack>>(load_word<kPack * sizeof(From)>(from + i));
    }
  }
  ORTRAIN_UNROLL
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = first + k * kThreads * kPack;
    if (packed && i + kPack <= part.count) {
      RowPack<To, kPack> pack;
      ORTRAIN_UNROLL
      for (int j = 0; j < kPack; ++j) pack[j] = cast(packs[k][j]);
      using Word = typename WordOf<kPack * sizeof(To)>::type;
      *reinterpret_cast<Word*>(to + i) = std::bit_cast<Word>(pack);
    } else {
      for (int64_t j = i; j < i + kPack && j < part.count; ++j) to[j] = cast(from[j]);
    }
  }
}

template <class From, class To>
int64_t blocks_of(int64_t count) {
  return (count + kPerBlock<From, To> - 1) / kPerBlock<From, To>;
}

template <class From, class To>
void cast_all(const std::vector<int64_t>& counts, const KernelArgs& args) {
  for (size_t next = 0; next < counts.size();) {
    DeviceArray<CastPart<From, To>, kParts> parts;
    int64_t blocks = 0;
    int used = 0;
    bool packed = true;
    for (; next < counts.size() && used < kParts; ++next) {
      if (counts[next] == 0) continue;
      const auto* const from = args.input<From>(next);
      auto* const to = args.output<To>(next);
      constexpr size_t kPack = kWidth<From, To>;
      packed &= reinterpret_cast<uintptr_t>(from) % (kPack * sizeof(From)) == 0 &&
                reinterpret_cast<uintptr_t>(to) % (kPack * sizeof(To)) == 0;
      parts[used++] = {from, to, counts[next], blocks};
      blocks += blocks_of<From, To>(counts[next]);
    }
    if (used == 0) return;
    launch(cast_parts<From, To>, {.blocks = block_count(blocks), .threads = kThreads}, args.stream,
           parts, used, packed);
  }
}

KernelFn make_cast_each(NodeSpec& spec) {
  std::vector<int64_t> counts;
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    counts.push_back(spec.has_output(i) ? spec.input(i).numel() : 0);
  }
  const DType type = *dtype_from_onnx(spec.attrs().int_("to"));
  return dispatch_float(spec.input(0).dtype, [&](auto from) -> KernelFn {
    return dispatch_float(type, [&](auto to) -> KernelFn {
      using From = typename decltype(from)::type;
      using To = typename decltype(to)::type;
      int64_t blocks = 0;
      for (const int64_t count : counts) blocks += blocks_of<From, To>(count);
      block_count(blocks);  // refuses what no launch can have
      return [counts](const KernelArgs& args) { cast_all<From, To>(counts, args); };
    });
  });
}

}  // namespace

void register_cast_each(KernelRegistry& registry) {
  registry.add("ortrain::CastEach", {{.name = "parts", .make = make_cast_each}});
}

}  // namespace ortrain::gpu
