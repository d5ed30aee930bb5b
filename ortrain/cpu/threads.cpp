// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/threads.h"

#include <omp.h>

#include <exception>
#include <limits>

namespace ortrain::cpu {
namespace {

// Keeps the exception of the lowest position, so that which error a user sees is reproducible.
class FirstException {
 public:
  template <class Fn>
  void guard(int64_t position, Fn fn) noexcept {
    try {
      fn();
    } catch (...) {
#pragma omp critical(ortrain_first_exception)
      if (position < position_) {
        position_ = position;
        exception_ = std::current_exception();
      }
    }
  }
  void rethrow() const {
    if (exception_) std::rethrow_exception(exception_);
  }

 private:
  int64_t position_ = std::numeric_limits<int64_t>::max();
  std::exception_ptr exception_;
};

}  // namespace

int thread_count() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

namespace internal {

void run_ranges(int64_t n, int64_t ranges, RangeFn fn, void* context) {
  FirstException first;
#pragma omp parallel num_threads(static_cast<int>(ranges))
  {
    // The runtime may grant fewer threads than asked for.
    const int64_t threads = omp_get_num_threads();
    for (int64_t range = omp_get_thread_num(); range < ranges; range += threads) {
      const int64_t begin = n / ranges * range + (range < n % ranges ? range : n % ranges);
      const int64_t end = begin + n / ranges + (range < n % ranges ? 1 : 0);
      first.guard(begin, [&] { fn(context, begin, end); });
    }
  }
  first.rethrow();
}

void run_blocks(int64_t blocks, RangeFn fn, void* context) {
  FirstException first;
  const int64_t threads = blocks < thread_count() ? blocks : thread_count();
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads))
  for (int64_t block = 0; block < blocks; ++block) {
    first.guard(block, [&] { fn(context, block, block + 1); });
  }
  first.rethrow();
}

}  // namespace internal
}  // namespace ortrain::cpu
