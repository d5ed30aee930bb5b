// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <mutex>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/runtime_names.h"

namespace ortrain::gpu {
namespace {

std::mutex allocator_mutex;
Allocator allocator;

ORTRAIN_GPU(Stream_t) stream_of(void* stream) { return static_cast<ORTRAIN_GPU(Stream_t)>(stream); }

void require(ORTRAIN_GPU(Error_t) code, const char* what) {
  check_device_call(static_cast<int>(code), what);
}

// Slots for faults in memory that host and device see, never given back: one per run in flight.
class FaultSlots {
 public:
  Fault* take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      constexpr size_t kCount = 64;
      void* memory = nullptr;
      require(ORTRAIN_GPU(HostAlloc)(&memory, kCount * sizeof(Fault), ORTRAIN_GPU(HostAllocMapped)),
              "allocating pinned memory");
      for (size_t i = 0; i < kCount; ++i) free_.push_back(static_cast<Fault*>(memory) + i);
    }
    Fault* slot = free_.back();
    free_.pop_back();
    *slot = {};
    return slot;
  }
  void give_back(Fault* slot) {
    const std::lock_guard lock(mutex_);
    free_.push_back(slot);
  }

 private:
  std::mutex mutex_;
  std::vector<Fault*> free_;
};

class GpuDevice final : public Device {
 public:
  explicit GpuDevice(int index) : index_(index) {}

  std::string name() const override { return str(platform(), ":", index_); }
  bool is_host() const override { return false; }

  std::shared_ptr<Block> arena(size_t bytes, void* stream) override { return take(bytes, stream); }
  std::shared_ptr<Block> tensor(size_t bytes, void* stream) override { return take(bytes, stream); }

  void copy(void* to, const void* from, size_t bytes, void* stream) override {
    if (bytes == 0 || to == from) return;
    require(ORTRAIN_GPU(MemcpyAsync)(to, from, bytes, ORTRAIN_GPU(MemcpyDeviceToDevice),
                                     stream_of(stream)),
            "copying on the device");
  }
  void upload(void* to, const void* from, size_t bytes, void* stream) override {
    if (bytes == 0) return;
    // Pageable memory: the call returns when the host's memory has been read.
    require(ORTRAIN_GPU(MemcpyAsync)(to, from, bytes, ORTRAIN_GPU(MemcpyHostToDevice),
                                     stream_of(stream)),
            "copying to the device");
    require(ORTRAIN_GPU(StreamSynchronize)(stream_of(stream)), "copying to the device");
  }
  void download(void* to, const void* from, size_t bytes, void* stream) override {
    if (bytes > 0) {
      require(ORTRAIN_GPU(MemcpyAsync)(to, from, bytes, ORTRAIN_GPU(MemcpyDeviceToHost),
                                       stream_of(stream)),
              "copying from the device");
    }
    require(ORTRAIN_GPU(StreamSynchronize)(stream_of(stream)), "waiting for the device");
  }
  void synchronize(void* stream) override {
    require(ORTRAIN_GPU(StreamSynchronize)(stream_of(stream)), "waiting for the device");
  }

  std::shared_ptr<Fault> make_fault_slot() override {
    return {slots_.take(), [this](Fault* slot) { slots_.give_back(slot); }};
  }

  std::shared_ptr<void> enter() override {
    int before = -1;
    require(ORTRAIN_GPU(GetDevice)(&before), "asking for the current device");
    if (before == index_) return nullptr;
    require(ORTRAIN_GPU(SetDevice)(index_), "changing the current device");
    // The pointer is not read; dropping it sets back what was current.
    return {static_cast<void*>(this),
            [before](void*) { static_cast<void>(ORTRAIN_GPU(SetDevice)(before)); }};
  }

 private:
  std::shared_ptr<Block> take(size_t bytes, void* stream) {
    bytes = std::max<size_t>(bytes, 64);
    Allocator own;
    {
      const std::lock_guard lock(allocator_mutex);
      own = allocator;
    }
    if (own) return own(index_, bytes, stream);
    void* memory = nullptr;
    const auto code = ORTRAIN_GPU(MallocAsync)(&memory, bytes, stream_of(stream));
    if (code == ORTRAIN_GPU(ErrorMemoryAllocation)) {
      static_cast<void>(ORTRAIN_GPU(GetLastError)());
      throw OutOfMemoryError(str("no ", bytes, " bytes on ", name()));
    }
    require(code, "allocating memory");
    return {new Block(memory, bytes), [stream](Block* block) {
              static_cast<void>(ORTRAIN_GPU(FreeAsync)(block->data(), stream_of(stream)));
              delete block;
            }};
  }

  int index_;
  FaultSlots slots_;
};

}  // namespace

std::string_view platform() { return ORTRAIN_GPU_PLATFORM; }

int device_count() {
  static const int count = [] {
    int found = 0;
    if (ORTRAIN_GPU(GetDeviceCount)(&found) != ORTRAIN_GPU(Success)) {
      static_cast<void>(ORTRAIN_GPU(GetLastError)());  // no driver: no device
      found = 0;
    }
    return found;
  }();
  return count;
}

Device& device(int index) {
  static const auto* const devices = [] {
    auto* all = new std::vector<std::unique_ptr<GpuDevice>>();
    for (int i = 0; i < device_count(); ++i) all->push_back(std::make_unique<GpuDevice>(i));
    return all;
  }();
  if (index < 0 || index >= device_count()) {
    throw DeviceError(str("there is no device ", platform(), ":", index, "; ", device_count(),
                          device_count() == 1 ? " is" : " are", " visible"));
  }
  return *(*devices)[static_cast<size_t>(index)];
}

void set_allocator(Allocator replacement) {
  const std::lock_guard lock(allocator_mutex);
  allocator = std::move(replacement);
}

namespace {

int device_attribute(int index, ORTRAIN_GPU_ATTRIBUTE_TYPE attribute) {
  int value = 0;
  require(ORTRAIN_GPU(DeviceGetAttribute)(&value, attribute, index), "asking about the device");
  return value;
}

}  // namespace

int current_device() {
  int index = 0;
  if (ORTRAIN_GPU(GetDevice)(&index) == ORTRAIN_GPU(Success)) return index;
  static_cast<void>(ORTRAIN_GPU(GetLastError)());
  return 0;
}

int multiprocessors(int index) {
  return device_attribute(index, ORTRAIN_GPU_ATTRIBUTE_MULTIPROCESSORS);
}

int compute_capability(int index) {
#if defined(__HIPCC__)
  (void)index;
  return 0;
#else
  return 10 * device_attribute(index, cudaDevAttrComputeCapabilityMajor) +
         device_attribute(index, cudaDevAttrComputeCapabilityMinor);
#endif
}

void check_device_call(int code, const char* what) {
  if (code == 0) return;
  const auto error = static_cast<ORTRAIN_GPU(Error_t)>(code);
  throw DeviceError(str(what, ": ", ORTRAIN_GPU(GetErrorString)(error), " (", code, ")"));
}

}  // namespace ortrain::gpu
