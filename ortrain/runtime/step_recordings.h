// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "ortrain/runtime/device.h"

namespace ortrain {

// Stretches of plans that devices have recorded (CUDA graphs), so that launching hundreds of
// kernels is one call. A recording holds the addresses that it was made with: in a steady loop a
// caching allocator hands out the same ones step after step. Addresses that come a second time are
// recorded; where they never come again, nothing is. The device bounds what there is in all
// (kept_recordings.h). Thread-safe.
class StepRecordings {
 public:
  // Steps `begin` to before `end` of the plan with this id.
  struct Stretch {
    uint64_t plan = 0;
    size_t begin = 0;
    size_t end = 0;
    auto operator<=>(const Stretch&) const = default;
  };

  // Only the stretches of plans that were admitted, and not dropped since, are recorded.
  void admit(uint64_t plan);
  // Launches what was recorded for these addresses, or calls `work`, which puts the steps onto the
  // stream that it gets: on `stream` itself, or to record it. Every address that the steps use and
  // that can change from run to run must be among `addresses`.
  void run(Device& device, const Stretch& stretch, std::vector<const void*> addresses, void* stream,
           const std::function<void(void*)>& work);
  // Forgets a plan.
  void drop(uint64_t plan);

  struct Counts {
    int64_t launched = 0;  // recordings
    int64_t recorded = 0;
    int64_t direct = 0;  // without a recording
  };
  Counts counts() const;

 private:
  struct Seen {
    std::vector<const void*> addresses;
    // Null where none was made; it may have had to go.
    std::shared_ptr<KeptRecordings::Place> place;
  };
  struct Kept {
    std::list<Seen> seen;  // most recently used first
    int misses = 0;        // since the last launch of a recording
  };

  mutable std::mutex mutex_;
  std::set<uint64_t> plans_;  // that were admitted
  std::map<Stretch, Kept> kept_;
  Counts counts_;
};

}  // namespace ortrain
