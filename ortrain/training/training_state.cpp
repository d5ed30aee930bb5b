// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/training_state.h"

#include "ortrain/base/philox.h"

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
