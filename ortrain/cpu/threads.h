// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

namespace ortrain::cpu {

// Threads that a parallel region started here may use: 1 inside an active region, otherwise
// OpenMP's maximum, which torch.set_num_threads sets.
int thread_count();

namespace internal {
using RangeFn = void (*)(void* context, int64_t begin, int64_t end);
void run_ranges(int64_t n, int64_t ranges, RangeFn fn, void* context);
void run_blocks(int64_t blocks, RangeFn fn, void* context);
}  // namespace internal

// Calls fn(begin, end) on disjoint ranges that cover [0, n), at most one per thread and none
// shorter than `grain` unless n is. The ranges depend on the number of threads: not for reductions.
// An exception of fn is rethrown here (the one of the lowest range).
template <class Fn>
void parallel_for(int64_t n, int64_t grain, Fn&& fn) {
  if (n <= 0) return;
  const int64_t most = grain > 1 ? (n + grain - 1) / grain : n;
  const int64_t ranges = most > 1 ? (most < thread_count() ? most : thread_count()) : 1;
  if (ranges <= 1) {
    fn(int64_t{0}, n);
    return;
  }
  using F = std::remove_reference_t<Fn>;
  internal::run_ranges(
      n, ranges,
      [](void* context, int64_t begin, int64_t end) { (*static_cast<F*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

// Calls fn(block) for 0 <= block < blocks, handed out one by one: for blocks of unequal cost, and
// for results that must not depend on the number of threads.
template <class Fn>
void parallel_blocks(int64_t blocks, Fn&& fn) {
  if (blocks <= 1 || thread_count() <= 1) {
    for (int64_t block = 0; block < blocks; ++block) fn(block);
    return;
  }
  using F = std::remove_reference_t<Fn>;
  internal::run_blocks(
      blocks, [](void* context, int64_t block, int64_t) { (*static_cast<F*>(context))(block); },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

}  // namespace ortrain::cpu
