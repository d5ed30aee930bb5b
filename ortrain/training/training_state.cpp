// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/training_state.h"

#include <cstring>

#include "ortrain/base/philox.h"
#include "ortrain/runtime/block_pool.h"

namespace ortrain {
namespace {

// No operator draws from this stream.
constexpr uint64_t kSeedStream = ~uint64_t{0};

}  // namespace

MutableTensor MutableTensor::allocate(TensorSpec spec) {
  std::shared_ptr<Block> block = BlockPool::host()->tensor(spec.bytes());
  void* data = block->data();
  return {std::move(spec), data, std::move(block)};
}

MutableTensor MutableTensor::zeros(TensorSpec spec) {
  MutableTensor tensor = allocate(std::move(spec));
  if (tensor.spec.bytes() > 0) std::memset(tensor.data, 0, tensor.spec.bytes());
  return tensor;
}

MutableTensor MutableTensor::copy_of(const TensorData& data) {
  MutableTensor tensor = allocate({data.dtype(), data.dims()});
  if (data.bytes() > 0) std::memcpy(tensor.data, data.data(), data.bytes());
  return tensor;
}

MutableTensor MutableTensor::clone() const {
  MutableTensor copy = allocate(spec);
  if (spec.bytes() > 0) std::memcpy(copy.data, data, spec.bytes());
  return copy;
}

int64_t TrainingState::draw_seed() {
  const std::array<uint32_t, 4> words = philox_block(seed, kSeedStream, runs++);
  const uint64_t value = (uint64_t{words[0]} << 32) | words[1];
  return static_cast<int64_t>(value >> 1);
}

}  // namespace ortrain
