// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/step_recordings.h"

#include <algorithm>

#include "ortrain/base/error.h"
#include "ortrain/base/log.h"

namespace ortrain {
namespace {

// Sets of addresses that are remembered per stretch: an allocator may go round in a few.
constexpr size_t kMostSeen = 8;
// Runs without a recording to launch after which no more are made: they would only cost.
constexpr int kMostMisses = 64;

}  // namespace

void StepRecordings::admit(uint64_t plan) {
  const std::lock_guard lock(mutex_);
  plans_.insert(plan);
}

void StepRecordings::run(Device& device, const Stretch& stretch, std::vector<const void*> addresses,
                         void* stream, const std::function<void(void*)>& work) {
  if (device.is_recorded_elsewhere(stream)) {
    work(stream);
    return;
  }
  std::shared_ptr<Recording> recording;
  bool record = false;
  {
    const std::lock_guard lock(mutex_);
    if (plans_.contains(stretch.plan)) {
      Kept& kept = kept_[stretch];
      const auto found = std::ranges::find(kept.seen, addresses, &Seen::addresses);
      if (found != kept.seen.end()) {
        kept.seen.splice(kept.seen.begin(), kept.seen, found);
        if (found->place) recording = found->place->use();
        record = recording == nullptr && kept.misses < kMostMisses;
      } else if (kept.misses < kMostMisses) {
        kept.seen.push_front({addresses, nullptr});
        if (kept.seen.size() > kMostSeen) kept.seen.pop_back();
      }
      kept.misses = recording ? 0 : kept.misses + 1;
    }
    ++(recording ? counts_.launched : counts_.direct);
  }
  if (recording) {
    recording->launch(stream);
    return;
  }
  if (!record) {
    work(stream);
    return;
  }
  // The steps have run with other addresses at least once: what they load at first is there.
  try {
    recording = device.record(work);
  } catch (const DeviceError& error) {  // something in it cannot be recorded
    if (log_enabled("plan")) log_line("plan", str("no recording: ", error.what()));
  }
  if (recording == nullptr) {
    {
      const std::lock_guard lock(mutex_);
      // The plan may be gone by now.
      const auto kept = kept_.find(stretch);
      if (kept != kept_.end()) kept->second.misses = kMostMisses;
    }
    work(stream);
    return;
  }
  recording->launch(stream);
  const std::shared_ptr<KeptRecordings::Place> place = device.kept_recordings().keep(recording);
  {
    const std::lock_guard lock(mutex_);
    ++counts_.recorded;
    const auto kept = kept_.find(stretch);
    if (kept != kept_.end()) {
      for (Seen& seen : kept->second.seen) {
        if (seen.addresses == addresses) seen.place = place;
      }
    }
  }
  if (log_enabled("plan")) {
    log_line("plan",
             str("recorded steps ", stretch.begin, " to ", stretch.end, " of plan ", stretch.plan));
  }
}

void StepRecordings::drop(uint64_t plan) {
  const std::lock_guard lock(mutex_);
  plans_.erase(plan);
  std::erase_if(kept_, [&](const auto& item) { return item.first.plan == plan; });
}

StepRecordings::Counts StepRecordings::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace ortrain
