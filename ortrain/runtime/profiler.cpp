// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/profiler.h"

#include <atomic>
#include <thread>

#include "ortrain/base/flags.h"

namespace ortrain {
namespace {

std::atomic<bool>& profiling_switch() {
  static std::atomic<bool> on{flag_is_on("ORTRAIN_PROFILE")};
  return on;
}

struct Profiles {
  std::mutex mutex;
  std::vector<std::shared_ptr<SessionProfile>> all;
};

// Never destroyed: sessions may end after static objects.
Profiles& profiles() {
  static Profiles* made = new Profiles;
  return *made;
}

uint32_t thread_number() {
  static std::atomic<uint32_t> next{0};
  thread_local const uint32_t number = next++;
  return number;
}

}  // namespace

bool profiling() { return profiling_switch().load(std::memory_order_relaxed); }

bool set_profiling(bool on) { return profiling_switch().exchange(on); }

void SessionProfile::record(const Graph& graph, const ExecutionPlan& plan, size_t step,
                            int64_t start, int64_t duration) {
  std::lock_guard lock(mutex_);
  const auto [found, is_first] =
      index_.try_emplace({plan.id, step}, static_cast<uint32_t>(steps_.size()));
  if (is_first) {
    const PlanStep& made = plan.steps[step];
    ProfiledStep row{.op = "copy", .kernel = made.kernel, .bytes = made.bytes, .flops = made.flops};
    row.phase = step < plan.num_forward_steps ? Phase::forward : Phase::backward;
    if (made.node != kNoNode) {
      const Node& node = graph.node(made.node);
      row.op = node.op;
      row.layer = node.name;
    }
    steps_.push_back(std::move(row));
  }
  ProfiledStep& row = steps_[found->second];
  ++row.runs;
  row.nanoseconds += duration;
  if (events_.size() == kMaxEvents) events_.pop_front();
  events_.push_back({found->second, thread_number(), start, duration});
}

SessionProfile::Snapshot SessionProfile::snapshot() const {
  std::lock_guard lock(mutex_);
  return {graph_, steps_, {events_.begin(), events_.end()}};
}

bool SessionProfile::is_empty() const {
  std::lock_guard lock(mutex_);
  return steps_.empty();
}

void SessionProfile::clear() {
  std::lock_guard lock(mutex_);
  steps_.clear();
  index_.clear();
  events_.clear();
}

std::shared_ptr<SessionProfile> make_profile(std::string graph) {
  auto made = std::make_shared<SessionProfile>(std::move(graph));
  std::lock_guard lock(profiles().mutex);
  // Those that recorded nothing go with their session.
  std::erase_if(profiles().all, [](const std::shared_ptr<SessionProfile>& profile) {
    return profile.use_count() == 1 && profile->is_empty();
  });
  profiles().all.push_back(made);
  return made;
}

std::vector<SessionProfile::Snapshot> all_profiles() {
  std::lock_guard lock(profiles().mutex);
  std::vector<SessionProfile::Snapshot> result;
  for (const std::shared_ptr<SessionProfile>& profile : profiles().all) {
    if (!profile->is_empty()) result.push_back(profile->snapshot());
  }
  return result;
}

void clear_profiles() {
  std::lock_guard lock(profiles().mutex);
  for (const std::shared_ptr<SessionProfile>& profile : profiles().all) profile->clear();
}

}  // namespace ortrain
