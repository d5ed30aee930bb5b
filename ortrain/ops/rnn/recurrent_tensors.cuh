// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "ortrain/runtime/kernel.h"

// The tensors of recurrent operators and of their workspace.
namespace ortrain::gpu {

// Where the inputs and outputs of an operator stand.
template <class Cell>
struct ForwardPlaces {
  static constexpr size_t kX = 0, kH0 = 1, kC0 = 2, kWih = 1 + Cell::kStates, kWhh = kWih + 1,
                          kBih = kWih + 2, kBhh = kWih + 3;
  static constexpr size_t kY = 0, kHn = 1, kCn = 2, kSaved = 1 + Cell::kStates, kCells = kSaved + 1;
};
template <class Cell>
struct GradPlaces {
  static constexpr size_t kDy = 0, kDhn = 1, kDcn = 2, kX = 1 + Cell::kStates, kH0 = kX + 1,
                          kC0 = kX + 2, kWih = kH0 + Cell::kStates, kWhh = kWih + 1, kY = kWih + 2,
                          kSaved = kWih + 3, kCells = kWih + 4;
  static constexpr size_t kDx = 0, kDh0 = 1, kDc0 = 2, kDwih = 1 + Cell::kStates, kDwhh = kDwih + 1,
                          kDbih = kDwih + 2, kDbhh = kDwih + 3;
};

// Addresses of a node's tensors; null for those that it has not.
template <class T>
class NodeTensors {
 public:
  explicit NodeTensors(const NodeSpec& spec) {
    for (size_t i = 0; i < kMost; ++i) {
      has_in_[i] = spec.has_input(i);
      has_out_[i] = spec.has_output(i);
    }
  }
  bool wants(size_t i) const { return has_out_.at(i); }
  const T* in(const KernelArgs& args, size_t i) const {
    return has_in_.at(i) ? args.input<T>(i) : nullptr;
  }
  T* out(const KernelArgs& args, size_t i) const {
    return has_out_.at(i) ? args.output<T>(i) : nullptr;
  }

 private:
  static constexpr size_t kMost = 12;
  std::array<bool, kMost> has_in_{}, has_out_{};
};

// Pieces of a workspace, the first of which all products share.
class Scratch {
 public:
  explicit Scratch(ByteCount products) : bytes_(products.rounded_up(kUnit)) {}

  // Its place, for `at`.
  template <class C>
  size_t add(int64_t count) {
    const size_t at = bytes_.value();
    bytes_ += bytes_of<C>(count).rounded_up(kUnit);
    return at;
  }
  ByteCount bytes() const { return bytes_; }

  template <class C>
  static C* at(const KernelArgs& args, size_t place) {
    return reinterpret_cast<C*>(static_cast<char*>(args.workspace) + place);
  }

 private:
  static constexpr size_t kUnit = 256;
  ByteCount bytes_;
};

}  // namespace ortrain::gpu
