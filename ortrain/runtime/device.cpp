// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/device.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/base/log.h"

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
  void write(void* to, const void* from, size_t bytes, void*) override { move(to, from, bytes); }
  void zero(void* to, size_t bytes, void*) override {
    if (bytes > 0) std::memset(to, 0, bytes);
  }
  void download(void* to, const void* from, size_t bytes, void*) override { move(to, from, bytes); }
  void synchronize(void*) override {}
  Fault* fault_slot() override { return nullptr; }  // its kernels throw

 private:
  static void move(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
};

constexpr size_t kAlignment = 64;

}  // namespace

bool is_raised(const Fault& fault) {
  const auto kind = static_cast<int32_t>(static_cast<const volatile FaultKind&>(fault.kind));
  std::atomic_thread_fence(std::memory_order_acquire);
  return kind > 0;
}

void throw_error(const std::string& context, const Fault& fault) {
  if (fault.kind == FaultKind::division) {
    // Not UnsupportedError, as on the host: the call that it surfaces in may have done nothing
    // wrong, and would be run again in PyTorch.
    throw Error(context + "integer division by zero");
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
  if (fault.kind == FaultKind::offset) {
    throw IndexError(str(context, "'offsets' has ", fault.value, " at ", fault.position,
                         ", expected a value in [", fault.low, ", ", fault.high, "]"));
  }
  if (fault.kind == FaultKind::group_end) {
    throw IndexError(str(context, "offsets[", fault.position, "] is ", fault.value,
                         "; it must be in [", fault.low, ", ", fault.high, "]"));
  }
  throw IndexError(str(context, fault.kind == FaultKind::label ? "label " : "index ", fault.value,
                       " at position ", fault.position, " is outside of [", fault.low, ", ",
                       fault.high, ")"));
}

void Device::count_if_faulty(int64_t*, void*) {
  check(fault_slot() == nullptr, "a device that records faults counts them");
}

std::vector<std::shared_ptr<Block>> Device::results(std::span<const TensorSpec* const> specs,
                                                    void* stream) {
  std::vector<std::shared_ptr<Block>> blocks;
  blocks.reserve(specs.size());
  for (const TensorSpec* spec : specs) blocks.push_back(tensor(spec->bytes(), stream));
  return blocks;
}

void Device::raise_faults() {
  Fault* const slot = fault_slot();
  if (slot == nullptr || !is_raised(*slot)) return;
  if (is_recorded_elsewhere(nullptr)) return;  // cannot be waited for: a later call throws
  synchronize_all();
  Fault found;
  {
    const std::lock_guard lock(fault_mutex_);
    if (!is_raised(*slot)) return;
    found = *slot;
    slot->step = 0;
    slot->value = slot->position = slot->low = slot->high = 0;
    slot->axis = -1;
    // Last, since a kernel may take the slot as soon as it is free.
    std::atomic_thread_fence(std::memory_order_release);
    static_cast<volatile FaultKind&>(slot->kind) = FaultKind::none;
    ++num_raised_;
  }
  throw_error(StepNumbers::context_of(found.step), found);
}

namespace {

struct NumberedSteps {
  std::mutex mutex;
  std::map<uint32_t, const std::vector<std::string>*> contexts;  // by first number
  uint32_t next = 0;

  static NumberedSteps& instance() {
    static auto* const steps = new NumberedSteps();
    return *steps;
  }
};

}  // namespace

StepNumbers::StepNumbers(std::vector<std::string> contexts) : contexts_(std::move(contexts)) {
  NumberedSteps& steps = NumberedSteps::instance();
  const std::lock_guard lock(steps.mutex);
  first_ = steps.next;
  steps.next += static_cast<uint32_t>(contexts_.size());
  steps.contexts[first_] = &contexts_;
}

StepNumbers::~StepNumbers() {
  NumberedSteps& steps = NumberedSteps::instance();
  const std::lock_guard lock(steps.mutex);
  steps.contexts.erase(first_);
}

std::string StepNumbers::context_of(uint32_t number) {
  NumberedSteps& steps = NumberedSteps::instance();
  const std::lock_guard lock(steps.mutex);
  const auto behind = steps.contexts.upper_bound(number);
  if (behind == steps.contexts.begin()) return {};
  const auto& [first, contexts] = *std::prev(behind);
  return number - first < contexts->size() ? (*contexts)[number - first] : std::string();
}

Device& host_device() {
  static Host* const device = new Host();
  return *device;
}

namespace {

thread_local bool planning_for_sizes = false;

}  // namespace

PlanningForSizes::PlanningForSizes(bool on) : before_(std::exchange(planning_for_sizes, on)) {}
PlanningForSizes::~PlanningForSizes() { planning_for_sizes = before_; }
bool PlanningForSizes::is_on() { return planning_for_sizes; }

std::shared_ptr<Block> place_bytes(Device& device, const void* data, size_t bytes) {
  if (PlanningForSizes::is_on()) {
    return std::make_shared<Block>(reinterpret_cast<void*>(uintptr_t{kAlignment}), bytes);
  }
  const std::shared_ptr<void> scope = device.enter();
  std::shared_ptr<Block> block = device.tensor(bytes, nullptr);
  // An allocator may hand out memory that work of the stream it is for still uses, and take it back
  // while work of other streams does: once per plan, all work is waited for.
  device.synchronize_all();
  device.upload(block->data(), data, bytes, nullptr);
  device.synchronize(nullptr);
  // A pool's block may be larger; how large a plan is does not hang on that.
  auto* const asked = new Block(block->data(), bytes);
  return {asked, [&device, block = std::move(block)](Block* given) mutable {
            delete given;
            try {
              const std::shared_ptr<void> entered = device.enter();
              device.synchronize_all();
            } catch (const Error& error) {  // the driver has gone before, at the process's end
              if (log_enabled("plan")) log_line("plan", error.what());
            }
            block.reset();
          }};
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
  bytes = std::max(bytes, kAlignment);
  // One transfer for all of them.
  std::vector<char> packed;
  size_t at = 0;
  if (!PlanningForSizes::is_on()) {
    packed.resize(bytes);
    for (const TensorData& constant : constants) {
      if (constant.bytes() > 0) std::memcpy(packed.data() + at, constant.data(), constant.bytes());
      at += room(constant);
    }
  }
  placed.block = place_bytes(device, packed.data(), bytes);
  at = 0;
  for (const TensorData& constant : constants) {
    placed.addresses.push_back(static_cast<char*>(placed.block->data()) + at);
    at += room(constant);
  }
  return placed;
}

}  // namespace ortrain
