// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "ortrain/base/error.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/launch.h"

namespace ortrain::gpu {
namespace {

// Memory of the host, used as if it was not: what moves goes through upload, copy and download.
class SimulatedDevice final : public Device {
 public:
  std::string name() const override { return "simulator"; }
  bool is_host() const override { return false; }
  std::shared_ptr<Block> arena(size_t bytes, void*) override {
    return BlockPool::host()->arena(bytes);
  }
  std::shared_ptr<Block> tensor(size_t bytes, void*) override {
    return BlockPool::host()->tensor(bytes);
  }
  void copy(void* to, const void* from, size_t bytes, void*) override { move(to, from, bytes); }
  void upload(void* to, const void* from, size_t bytes, void*) override { move(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes, void*) override { move(to, from, bytes); }
  void synchronize(void*) override {}
  std::shared_ptr<Fault> make_fault_slot() override { return std::make_shared<Fault>(); }

 private:
  static void move(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memmove(to, from, bytes);
  }
};

}  // namespace

std::string_view platform() { return "simulator"; }
int device_count() { return 1; }

Device& device(int index) {
  if (index != 0) throw DeviceError(str("the simulator has one device, not ", index + 1));
  static SimulatedDevice* const simulated = new SimulatedDevice();
  return *simulated;
}

void set_allocator(Allocator) {}  // host memory comes from its pool
int current_device() { return 0; }
int multiprocessors(int) { return 4; }
int compute_capability(int) { return 80; }

void check_device_call(int code, const char* what) { check(code == 0, what); }

}  // namespace ortrain::gpu
