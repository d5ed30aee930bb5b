// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "ortrain/ir/node_spec.h"
#include "ortrain/ir/tensor_data.h"
#include "ortrain/runtime/block_pool.h"
#include "ortrain/runtime/fault.h"
#include "ortrain/runtime/kept_recordings.h"

namespace ortrain {

// Whether it is there in full; a kernel may be writing it.
bool is_raised(const Fault& fault);
// Throws IndexError ("index 7 at position 1 is outside of [0, 5)"; "indices[1] = 7 is out of range
// for an extent of 5" for kind `element`), ShapeError or Error, `context` in front. Low
// and high of kind `range` are the bits of doubles.
[[noreturn]] void throw_error(const std::string& context, const Fault& fault);

// The memory that a provider's kernels work on, and the queue of their work. A stream is the
// device's own kind of handle, null = its default; work of one stream happens in order.
// Thread-safe.
class Device {
 public:
  virtual ~Device() = default;
  // "cpu", "cuda:0", "hip:0", "simulator"
  virtual std::string name() const = 0;
  // Its number among those of its kind.
  virtual int index() const { return 0; }
  // Kernels run before the call returns, on memory that the host reads and writes.
  virtual bool is_host() const = 0;

  // Memory, 64-byte aligned, contents undefined, ready for work of this stream. Throws
  // OutOfMemoryError naming the size.
  virtual std::shared_ptr<Block> arena(size_t bytes, void* stream) = 0;
  virtual std::shared_ptr<Block> tensor(size_t bytes, void* stream) = 0;
  // The same for tensors that whoever asked for a run gets to keep, one block per spec.
  virtual std::vector<std::shared_ptr<Block>> results(std::span<const TensorSpec* const> specs,
                                                      void* stream);

  // Between two places on the device, in the order of the stream.
  virtual void copy(void* to, const void* from, size_t bytes, void* stream) = 0;
  // From the host, whose memory may be changed as soon as it returns.
  virtual void upload(void* to, const void* from, size_t bytes, void* stream) = 0;
  // A few bytes from the host in the order of the stream, without waiting: at most kMostWritten.
  static constexpr size_t kMostWritten = 1024;
  virtual void write(void* to, const void* from, size_t bytes, void* stream) = 0;
  virtual void zero(void* to, size_t bytes, void* stream) = 0;
  // To the host: waits until the stream is done.
  virtual void download(void* to, const void* from, size_t bytes, void* stream) = 0;
  virtual void synchronize(void* stream) = 0;
  // Waits for all work of the device.
  virtual void synchronize_all() { synchronize(nullptr); }

  // The stream is being recorded by somebody else: work on it joins that recording.
  virtual bool is_recorded_elsewhere(void*) { return false; }
  // Whether `record` can give something.
  virtual bool records() const { return false; }
  // Records what `work` puts onto the stream that it gets; nothing of it runs. Null where the
  // device refuses something among it.
  virtual std::shared_ptr<Recording> record(const std::function<void(void* stream)>&) {
    return nullptr;
  }
  KeptRecordings& kept_recordings() { return kept_recordings_; }

  // Where kernels put the first fault, readable by host and device; null where they throw.
  virtual Fault* fault_slot() = 0;
  // Throws what is there by now, naming the node, when all work of the device is done: what was on
  // its way ran with the fault recorded, what comes later runs without it. So one thread per device
  // trains. Where it cannot wait (somebody else records a stream) the fault stays for a later call.
  virtual void raise_faults();
  // How often that has thrown.
  int64_t num_raised() const { return num_raised_; }
  // Adds 1 to a number on the device if a fault is recorded then, in the order of the stream.
  virtual void count_if_faulty(int64_t* count, void* stream);

  // Makes the device the calling thread's current one, until the result is dropped; may be null.
  virtual std::shared_ptr<void> enter() { return nullptr; }

 private:
  std::mutex fault_mutex_;
  std::atomic<int64_t> num_raised_{0};
  KeptRecordings kept_recordings_;
};

// Numbers for the steps of one plan that no other plan alive has, and what to call them in errors.
class StepNumbers {
 public:
  explicit StepNumbers(std::vector<std::string> contexts);
  ~StepNumbers();
  StepNumbers(const StepNumbers&) = delete;
  StepNumbers& operator=(const StepNumbers&) = delete;
  uint32_t first() const { return first_; }
  // "" where no plan has it (any more).
  static std::string context_of(uint32_t number);

 private:
  uint32_t first_;
  std::vector<std::string> contexts_;
};

// Host memory, from BlockPool::host().
Device& host_device();

// While one with `on` lives, the plans that its thread makes are there for their sizes alone: the
// functions below put nothing on a device, and give addresses that nobody may read.
class PlanningForSizes {
 public:
  explicit PlanningForSizes(bool on);
  ~PlanningForSizes();
  PlanningForSizes(const PlanningForSizes&) = delete;
  PlanningForSizes& operator=(const PlanningForSizes&) = delete;
  // Of the calling thread.
  static bool is_on();

 private:
  bool before_;
};

// A copy of host memory on the device for as long as it is held, for work of any stream.
std::shared_ptr<Block> place_bytes(Device& device, const void* data, size_t bytes);

// Constants of a plan where the kernels read them.
struct PlacedConstants {
  std::vector<const void*> addresses;  // per constant
  std::shared_ptr<Block> block;        // null where the host's memory serves
};
PlacedConstants place_constants(Device& device, const std::vector<TensorData>& constants);

}  // namespace ortrain
