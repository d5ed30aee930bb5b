// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>

namespace ortrain {

// Work that a device has recorded, to be launched any number of times.
class Recording {
 public:
  virtual ~Recording() = default;
  virtual void launch(void* stream) = 0;
  // Kernels, copies and the like in it.
  virtual size_t num_launches() const { return 1; }
};

// All recordings of a device, of whatever plan: beyond a bound those used least recently go. What
// bytes they take a device does not say; their launches stand for that. Thread-safe.
class KeptRecordings {
 public:
  struct Limits {
    size_t recordings = 256;
    size_t launches = size_t{1} << 17;  // of all together; one alone may have more
  };

  // A recording among the others; taken out when it is dropped.
  class Place {
   public:
    Place(KeptRecordings& all, std::shared_ptr<Recording> recording);
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    // Null once it had to go. It counts as used.
    std::shared_ptr<Recording> use();

   private:
    friend class KeptRecordings;
    KeptRecordings& all_;
    std::shared_ptr<Recording> recording_;
    std::list<Place*>::iterator at_;
    size_t launches_;
  };

  std::unique_ptr<Place> keep(std::shared_ptr<Recording> recording);
  void set_limits(Limits limits);

  struct Counts {
    size_t recordings = 0;
    size_t launches = 0;
  };
  Counts counts() const;

 private:
  // Returns what goes, to be dropped without the lock.
  std::list<std::shared_ptr<Recording>> make_room();

  mutable std::mutex mutex_;
  std::list<Place*> by_use_;  // most recently used first
  size_t launches_ = 0;
  Limits limits_;
};

}  // namespace ortrain
