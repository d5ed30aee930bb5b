// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/simulated_device.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/simulator_races.h"

namespace ortrain::gpu {
namespace {

class SimulatedRecording final : public Recording {
 public:
  explicit SimulatedRecording(std::vector<std::function<void()>> work) : work_(std::move(work)) {}
  void launch(void*) override {
    for (const std::function<void()>& each : work_) each();
  }
  size_t num_launches() const override { return work_.size(); }

 private:
  std::vector<std::function<void()>> work_;
};

std::mutex allocator_mutex;
Allocator allocator;
ResultAllocator result_allocator;

Allocator current_allocator() {
  const std::lock_guard lock(allocator_mutex);
  return allocator;
}

std::atomic<int64_t> uploads{0};
std::atomic<bool> is_behind{false};

// Memory of the host, used as if it was not: what moves goes through upload, copy and download.
class SimulatedDevice final : public Device {
 public:
  std::string name() const override { return "simulator"; }
  bool is_host() const override { return false; }
  std::shared_ptr<Block> arena(size_t bytes, void* stream) override {
    const Allocator allocator = current_allocator();
    return allocator ? allocator(0, bytes, stream) : BlockPool::host()->arena(bytes);
  }
  std::shared_ptr<Block> tensor(size_t bytes, void* stream) override {
    const Allocator allocator = current_allocator();
    return allocator ? allocator(0, bytes, stream) : BlockPool::host()->tensor(bytes);
  }
  std::vector<std::shared_ptr<Block>> results(std::span<const TensorSpec* const> specs,
                                              void* stream) override {
    ResultAllocator own;
    {
      const std::lock_guard lock(allocator_mutex);
      own = result_allocator;
    }
    return own ? own(0, specs, stream) : Device::results(specs, stream);
  }
  void copy(void* to, const void* from, size_t bytes, void*) override {
    simulator::submit([=] { move(to, from, bytes); });
  }
  void upload(void* to, const void* from, size_t bytes, void*) override {
    refuse_while_recording();
    ++uploads;
    move(to, from, bytes);
  }
  void write(void* to, const void* from, size_t bytes, void*) override {
    check(bytes <= kMostWritten, "too much for one write");
    std::vector<char> kept(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    simulator::submit([=] { move(to, kept.data(), kept.size()); });
  }
  void zero(void* to, size_t bytes, void*) override {
    simulator::submit([=] {
      if (bytes > 0) std::memset(to, 0, bytes);
    });
  }
  void download(void* to, const void* from, size_t bytes, void*) override {
    refuse_while_recording();
    move(to, from, bytes);
  }
  void synchronize(void*) override { refuse_while_recording(); }
  void synchronize_all() override {
    const std::lock_guard lock(recording_mutex_);
    refuse_while_recording();
  }
  bool records() const override { return true; }
  std::shared_ptr<Recording> record(const std::function<void(void*)>& work) override {
    const std::lock_guard lock(recording_mutex_);
    simulator::Recorder recorder;
    work(nullptr);
    return std::make_shared<SimulatedRecording>(recorder.take());
  }
  Fault* fault_slot() override { return &fault_; }
  void raise_faults() override {
    if (!is_behind) Device::raise_faults();
  }
  void count_if_faulty(int64_t* count, void*) override {
    simulator::submit([=, this] { *count += is_raised(fault_); });
  }

 private:
  Fault fault_;
  std::recursive_mutex recording_mutex_;  // as on a device
  static void refuse_while_recording() {
    if (simulator::is_recording()) throw DeviceError("a recording cannot wait for the device");
  }
  static void move(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memmove(to, from, bytes);
  }
};

}  // namespace

int64_t simulator::num_uploads() { return uploads; }
void simulator::fall_behind(bool on) { is_behind = on; }

std::string_view platform() { return "simulator"; }
int device_count() { return 1; }

Device& device(int index) {
  if (index != 0) throw DeviceError(str("the simulator has one device, not ", index + 1));
  static SimulatedDevice* const simulated = new SimulatedDevice();
  return *simulated;
}

void set_allocator(Allocator replacement, ResultAllocator of_results) {
  const std::lock_guard lock(allocator_mutex);
  allocator = std::move(replacement);
  result_allocator = std::move(of_results);
}
int current_device() { return 0; }
// Where accesses are looked at, as many as an H100 has: launches are other ones then.
int multiprocessors(int) { return simulator::kFindsRaces ? 132 : 4; }
int64_t shared_memory_per_block(int) { return int64_t{227} << 10; }
int compute_capability(int) { return 80; }

void check_device_call(int code, const char* what) { check(code == 0, what); }

}  // namespace ortrain::gpu
