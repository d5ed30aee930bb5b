// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/device.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

class Host final : public Device {
 public:
  std::string name() const override { return "cpu"; }
  bool is_host() const override { return true; }
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
  std::shared_ptr<Fault> make_fault_slot() override { return nullptr; }  // its kernels throw

 private:
  static void move(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
};

constexpr size_t kAlignment = 64;
constexpr size_t kWatchedSlots = 256;

}  // namespace

bool is_raised(const Fault& fault) {
  const auto kind = static_cast<int32_t>(static_cast<const volatile FaultKind&>(fault.kind));
  std::atomic_thread_fence(std::memory_order_acquire);
  return kind > 0;
}

void throw_error(const std::string& context, const Fault& fault) {
  if (fault.kind == FaultKind::division) {
    throw UnsupportedError(context + "integer division by zero");
  }
  if (fault.kind == FaultKind::shape) {
    throw ShapeError(
        str(context, "the result has ", fault.value, " elements, expected ", fault.low));
  }
  if (fault.kind == FaultKind::element) {
    std::string allowed;
    if (fault.axis >= 0) {
      allowed = str(" (axis ", fault.axis, "): allowed are ", -fault.high, " to ", fault.high - 1);
    }
    throw IndexError(str(context, "indices[", fault.position, "] = ", fault.value,
                         " is out of range for an extent of ", fault.high, allowed));
  }
  if (fault.kind == FaultKind::range) {
    throw IndexError(str(context, "the range [", std::bit_cast<double>(fault.low), ", ",
                         std::bit_cast<double>(fault.high), "] of x is not finite"));
  }
  throw IndexError(str(context, fault.kind == FaultKind::label ? "label " : "index ", fault.value,
                       " at position ", fault.position, " is outside of [", fault.low, ", ",
                       fault.high, ")"));
}

void Device::watch(std::shared_ptr<Fault> slot, std::function<void(const Fault&)> thrower) {
  const std::lock_guard lock(watched_mutex_);
  watched_.push_back({std::move(slot), std::move(thrower)});
  if (watched_.size() > kWatchedSlots && !is_raised(*watched_.front().slot)) watched_.pop_front();
}

void Device::raise_faults() {
  Watched raised;
  {
    const std::lock_guard lock(watched_mutex_);
    const auto found = std::ranges::find_if(
        watched_, [](const Watched& watched) { return is_raised(*watched.slot); });
    if (found == watched_.end()) return;
    raised = std::move(*found);
    watched_.erase(found);
  }
  raised.thrower(*raised.slot);
}

Device& host_device() {
  static Host* const device = new Host();
  return *device;
}

PlacedConstants place_constants(Device& device, const std::vector<TensorData>& constants) {
  PlacedConstants placed;
  if (device.is_host()) {
    for (const TensorData& constant : constants) placed.addresses.push_back(constant.data());
    return placed;
  }
  size_t bytes = 0;
  const auto room = [](const TensorData& constant) {
    return (constant.bytes() + kAlignment - 1) / kAlignment * kAlignment;
  };
  for (const TensorData& constant : constants) bytes += room(constant);
  if (constants.empty()) return placed;
  const std::shared_ptr<void> scope = device.enter();
  // One transfer for all of them.
  std::vector<char> packed(std::max<size_t>(bytes, kAlignment));
  placed.block = device.tensor(packed.size(), nullptr);
  size_t at = 0;
  for (const TensorData& constant : constants) {
    if (constant.bytes() > 0) std::memcpy(packed.data() + at, constant.data(), constant.bytes());
    placed.addresses.push_back(static_cast<char*>(placed.block->data()) + at);
    at += room(constant);
  }
  device.upload(placed.block->data(), packed.data(), packed.size(), nullptr);
  // Other streams read them too.
  device.synchronize(nullptr);
  return placed;
}

}  // namespace ortrain
