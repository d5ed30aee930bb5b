// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <omp.h>

namespace ortrain::onednn {

// Lets oneDNN ask for no more threads than OpenMP grants while it lives. oneDNN divides its work by
// omp_get_max_threads(), or by what that was when a primitive was made; the share of a thread that
// was not granted is never computed.
class Team {
 public:
  Team() : asked_(omp_get_max_threads()), was_dynamic_(omp_get_dynamic()) {
    // Else each region may get another number, by the load of the machine.
    if (was_dynamic_ != 0) omp_set_dynamic(0);
    size_ = asked_ > 1 ? granted(asked_) : 1;
    if (size_ != asked_) omp_set_num_threads(size_);
  }
  ~Team() {
    if (size_ != asked_) omp_set_num_threads(asked_);
    if (was_dynamic_ != 0) omp_set_dynamic(was_dynamic_);
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

 private:
  // What a region really gets is asked once, and again when what it depends on has changed.
  static int granted(int threads) {
    if (omp_in_parallel() != 0) return 1;  // oneDNN starts no region there
    struct Answer {
      int threads = 0, limit = 0, levels = 0, granted = 1;
    };
    static thread_local Answer last;
    const int limit = omp_get_thread_limit();
    const int levels = omp_get_max_active_levels();
    if (threads != last.threads || limit != last.limit || levels != last.levels) {
      int found = 1;
#pragma omp parallel num_threads(threads)
#pragma omp single
      found = omp_get_num_threads();
      last = {threads, limit, levels, found};
    }
    return last.granted;
  }

  int asked_;
  int was_dynamic_;
  int size_ = 1;
};

}  // namespace ortrain::onednn
