// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ortrain/ir/graph.h"
#include "ortrain/runtime/execution_plan.h"

namespace ortrain {

// Whether nodes are timed; at first what ORTRAIN_PROFILE says.
bool profiling();
// Returns the previous state. Runs in flight keep the state they began with.
bool set_profiling(bool on);

// One kernel call of one plan, with its times summed over runs.
struct ProfiledStep {
  std::string op;  // "copy" for a copy into an output
  std::string layer;
  std::string kernel;
  Phase phase = Phase::forward;
  double bytes = 0;  // read and written, by the shapes
  double flops = 0;  // of matrix products; 0 for everything else
  int64_t runs = 0;
  int64_t nanoseconds = 0;
};

// One run of one step. Times are those of std::chrono::steady_clock.
struct ProfiledEvent {
  uint32_t step = 0;    // into SessionProfile::Snapshot::steps
  uint32_t thread = 0;  // numbered by first appearance
  int64_t start = 0;    // nanoseconds
  int64_t duration = 0;
};

// What the runs of one session took. Thread-safe. All of them are kept, also when their session has
// gone, until clear_profiles().
class SessionProfile {
 public:
  struct Snapshot {
    std::string graph;
    std::vector<ProfiledStep> steps;
    std::vector<ProfiledEvent> events;  // the latest kMaxEvents
  };
  static constexpr size_t kMaxEvents = size_t{1} << 18;

  explicit SessionProfile(std::string graph) : graph_(std::move(graph)) {}

  void record(const Graph& graph, const ExecutionPlan& plan, size_t step, int64_t start,
              int64_t duration);
  Snapshot snapshot() const;
  bool is_empty() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::string graph_;
  std::vector<ProfiledStep> steps_;
  std::map<std::pair<uint64_t, size_t>, uint32_t> index_;  // (plan, step)
  std::deque<ProfiledEvent> events_;
};

// Makes a profile that all_profiles() will list as soon as it has something.
std::shared_ptr<SessionProfile> make_profile(std::string graph);
std::vector<SessionProfile::Snapshot> all_profiles();
void clear_profiles();

}  // namespace ortrain
