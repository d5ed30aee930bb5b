// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/kept_recordings.h"

#include <utility>

namespace ortrain {

KeptRecordings::Place::Place(KeptRecordings& all, std::shared_ptr<Recording> recording)
    : all_(all), recording_(std::move(recording)), launches_(recording_->num_launches()) {
  std::list<std::shared_ptr<Recording>> gone;
  const std::lock_guard lock(all_.mutex_);
  all_.by_use_.push_front(this);
  at_ = all_.by_use_.begin();
  all_.launches_ += launches_;
  gone = all_.make_room();
}

KeptRecordings::Place::~Place() {
  const std::lock_guard lock(all_.mutex_);
  if (recording_ == nullptr) return;
  all_.by_use_.erase(at_);
  all_.launches_ -= launches_;
}

std::shared_ptr<Recording> KeptRecordings::Place::use() {
  const std::lock_guard lock(all_.mutex_);
  if (recording_ != nullptr) all_.by_use_.splice(all_.by_use_.begin(), all_.by_use_, at_);
  return recording_;
}

std::unique_ptr<KeptRecordings::Place> KeptRecordings::keep(std::shared_ptr<Recording> recording) {
  return std::make_unique<Place>(*this, std::move(recording));
}

std::list<std::shared_ptr<Recording>> KeptRecordings::make_room() {
  std::list<std::shared_ptr<Recording>> gone;
  while (by_use_.size() > 1 &&
         (by_use_.size() > limits_.recordings || launches_ > limits_.launches)) {
    Place& last = *by_use_.back();
    by_use_.pop_back();
    launches_ -= last.launches_;
    gone.push_back(std::move(last.recording_));
    last.recording_ = nullptr;
  }
  return gone;
}

void KeptRecordings::set_limits(Limits limits) {
  std::list<std::shared_ptr<Recording>> gone;
  const std::lock_guard lock(mutex_);
  limits_ = limits;
  gone = make_room();
}

KeptRecordings::Counts KeptRecordings::counts() const {
  const std::lock_guard lock(mutex_);
  return {by_use_.size(), launches_};
}

}  // namespace ortrain
