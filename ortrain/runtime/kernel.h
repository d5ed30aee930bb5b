// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ortrain/ir/node_spec.h"

namespace ortrain {

struct Fault;

// What the nodes of one run keep from its forward for its backward, by a number of theirs.
struct RunState {
  std::map<int64_t, std::shared_ptr<void>> kept;
};

// Addresses of one run: null for absent inputs and outputs; 64-byte aligned unless the tensor
// comes from the user.
struct KernelArgs {
  const void* const* in;
  void* const* out;
  void* workspace;
  RunState* run = nullptr;  // null while planning
  // On a device: the stream to work on, where to report what is wrong with values, and the number
  // to report it under.
  void* stream = nullptr;
  Fault* fault = nullptr;
  uint32_t step = 0;

  template <typename T>
  const T* input(size_t i) const {
    return static_cast<const T*>(in[i]);
  }
  template <typename T>
  T* output(size_t i) const {
    return static_cast<T*>(out[i]);
  }
};

// Runs one node. Made once per plan with shapes and attributes burned in; must not allocate.
using KernelFn = std::function<void(const KernelArgs&)>;

struct Kernel {
  std::string name;  // the algorithm: "ref", "simd", "onednn", "softmax_online"
  // Element types of the first input for which it may be chosen; empty = all the schema allows.
  DTypeSet types = {};
  // A reason why it cannot take this node, or nullopt. Null = takes every node of its types.
  std::function<std::optional<std::string>(const NodeSpec&)> why_not = nullptr;
  // Builds the closure. Null only for views.
  std::function<KernelFn(NodeSpec&)> make = nullptr;
  // (input, output) pairs that may be the same memory if nobody reads the input later: the kernel
  // reads each element of the input before it writes that element of the output. Used only when
  // both have the same number of bytes.
  std::vector<std::pair<int, int>> inplace = {};
  // Set where the pairs depend on the node: used instead of `inplace`.
  std::function<std::vector<std::pair<int, int>>(const NodeSpec&)> inplace_of = nullptr;
  // It waits for the device, or runs code outside of the engine: it cannot be part of a recording.
  bool waits = false;
  // For operators that only look at their first input differently: the byte offset of each output
  // inside input 0; nullopt = this node is no view, use the next kernel.
  std::function<std::optional<std::vector<int64_t>>(const NodeSpec&)> view = nullptr;
};

// A view kernel whose single output is all of input 0 (Reshape, Identity, ...).
Kernel whole_input_view();

}  // namespace ortrain
