// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/training_state.h"

#include <algorithm>
#include <functional>
#include <string_view>

#include "ortrain/base/philox.h"
#include "ortrain/training/training_options.h"

namespace ortrain {
namespace {

// No operator draws from this stream.
constexpr uint64_t kSeedStream = ~uint64_t{0};

}  // namespace

MutableTensor MutableTensor::allocate(TensorSpec spec, Device& device) {
  const std::shared_ptr<void> scope = device.enter();
  std::shared_ptr<Block> block = device.tensor(spec.bytes(), nullptr);
  void* data = block->data();
  return {std::move(spec), data, std::move(block), &device};
}

MutableTensor MutableTensor::zeros(TensorSpec spec, Device& device) {
  MutableTensor tensor = allocate(std::move(spec), device);
  const std::shared_ptr<void> scope = device.enter();
  device.synchronize_all();  // work of the stream that the memory is for may still use it
  device.zero(tensor.data, tensor.spec.bytes(), nullptr);
  device.synchronize(nullptr);  // work of other streams reads it
  return tensor;
}

MutableTensor MutableTensor::copy_of(const TensorData& data, Device& device) {
  MutableTensor tensor = allocate({data.dtype(), data.dims()}, device);
  const std::shared_ptr<void> scope = device.enter();
  device.synchronize_all();
  device.upload(tensor.data, data.data(), data.bytes(), nullptr);
  return tensor;
}

MutableTensor MutableTensor::clone(Device& on) const {
  MutableTensor copy = allocate(spec, on);
  copy.assign(*this);
  return copy;
}

MutableTensor MutableTensor::on_host() const {
  return device->is_host() ? *this : clone(host_device());
}

void MutableTensor::assign(const MutableTensor& other) const {
  const size_t bytes = spec.bytes();
  const std::shared_ptr<void> scope = device->enter();
  device->synchronize_all();  // what it has to do may read or write either one
  if (device == other.device) {
    device->copy(data, other.data, bytes, nullptr);
    device->synchronize(nullptr);
  } else if (other.device->is_host()) {
    device->upload(data, other.data, bytes, nullptr);
  } else if (device->is_host()) {
    const std::shared_ptr<void> source = other.device->enter();
    other.device->synchronize_all();
    other.device->download(data, other.data, bytes, nullptr);
  } else {
    assign(other.on_host());
  }
}

void TrainingState::settle() {
  const int64_t raised = device->num_raised();
  if (raised == raised_before_) return;
  raised_before_ = raised;
  settle_now();
}

void TrainingState::settle_now() {
  if (undone_.data == nullptr) return;
  int64_t counts[2];
  const std::shared_ptr<void> scope = device->enter();
  device->synchronize_all();
  device->download(counts, undone_.data, sizeof(counts), nullptr);
  device->zero(undone_.data, sizeof(counts), nullptr);
  device->synchronize(nullptr);
  steps -= counts[0];
  if (counts[1] > 0) kept_batches = 0;
}

bool TrainingState::has_states(const std::string& parameter) const {
  const std::string prefix = state_target(parameter, "");
  for (auto at = optimizer.lower_bound(prefix);
       at != optimizer.end() && at->first.starts_with(prefix); ++at) {
    const std::string_view kind = std::string_view(at->first).substr(prefix.size());
    if (kind != kAccumulatedGradient && kind != kOwnedGradient) return true;
  }
  return false;
}

int64_t TrainingState::updates_of(const std::string& parameter) const {
  if (const auto at = behind_.find(parameter); at != behind_.end()) return steps - at->second;
  if (const auto at = idle_.find(parameter); at != idle_.end()) return at->second;
  return !began_ && has_states(parameter) ? steps : 0;
}

std::map<std::string, int64_t> TrainingState::updates() const {
  std::map<std::string, int64_t> result = idle_;
  for (const auto& [parameter, behind] : behind_) result[parameter] = steps - behind;
  for (const auto& [target, tensor] : optimizer) {
    const std::string parameter = target.substr(0, target.rfind(':'));
    if (!result.contains(parameter)) result[parameter] = updates_of(parameter);
  }
  return result;
}

void TrainingState::set_updates(const std::map<std::string, int64_t>& given) {
  updated_.clear();
  behind_.clear();
  idle_ = given;
  began_ = false;
}

void TrainingState::begin_state(const std::string& target) {
  const size_t colon = target.rfind(':');
  if (began_ || colon == std::string::npos) return;
  const std::string parameter = target.substr(0, colon), kind = target.substr(colon + 1);
  if (kind == kAccumulatedGradient || kind == kOwnedGradient || has_states(parameter)) return;
  idle_.emplace(parameter, 0);
}

void TrainingState::begin_update(const std::vector<std::string>& parameters) {
  if (began_ && parameters == updated_) return;
  settle_now();  // steps that are taken back later would count for those that are left out
  std::map<std::string, int64_t> idle = updates(), behind;
  for (const std::string& parameter : parameters) {
    behind[parameter] = steps - updates_of(parameter);
    idle.erase(parameter);
  }
  alike_ = std::ranges::adjacent_find(behind, std::ranges::not_equal_to{}, [](const auto& entry) {
             return entry.second;
           }) == behind.end();
  behind_ = std::move(behind);
  idle_ = std::move(idle);
  updated_ = parameters;
  began_ = true;
}

int64_t* TrainingState::undone() {
  if (undone_.data == nullptr || undone_.device != device) {
    undone_ = MutableTensor::zeros({DType::i64, {2}}, *device);
  }
  return static_cast<int64_t*>(undone_.data);
}

int64_t TrainingState::draw_seed() {
  const std::array<uint32_t, 4> words = philox_block(seed, kSeedStream, runs++);
  const uint64_t value = (uint64_t{words[0]} << 32) | words[1];
  return static_cast<int64_t>(value >> 1);
}

}  // namespace ortrain
