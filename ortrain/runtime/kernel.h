// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/base/dtype.h"
#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ir/graph.h"

namespace ortrain {

// Type and concrete shape of a dense row-major tensor; dtype undefined = absent.
struct TensorSpec {
  DType dtype = DType::undefined;
  Dims dims;

  bool defined() const { return dtype != DType::undefined; }
  int64_t numel() const { return num_elements(dims); }
  size_t bytes() const { return static_cast<size_t>(numel()) * size_of(dtype); }
  int64_t rank() const { return static_cast<int64_t>(dims.size()); }
  bool operator==(const TensorSpec&) const = default;
};

std::string tensor_spec_str(const TensorSpec& spec);  // "float32[2, 3]"

// One node with concrete types and shapes: what a kernel is made for.
class NodeSpec {
 public:
  NodeSpec(const OpDef& def, const Node& node, std::vector<TensorSpec> inputs,
           std::vector<TensorSpec> outputs, std::vector<const void*> constants)
      : def_(&def),
        node_(&node),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)),
        constants_(std::move(constants)) {}

  const Node& node() const { return *node_; }
  AttributeReader attrs() const { return AttributeReader(*def_, *node_); }
  // "[Op 'layer'] " for messages; take a copy into the kernel where it can fail at run time.
  std::string context() const { return Graph::context(*node_); }

  size_t num_inputs() const { return inputs_.size(); }
  size_t num_outputs() const { return outputs_.size(); }
  bool has_input(size_t i) const { return i < inputs_.size() && inputs_[i].defined(); }
  bool has_output(size_t i) const { return i < outputs_.size() && outputs_[i].defined(); }
  const TensorSpec& input(size_t i) const { return inputs_.at(i); }
  const TensorSpec& output(size_t i) const { return outputs_.at(i); }
  // Address of the contents of input `i` when they are known while planning, else null. Valid as
  // long as the plan.
  const void* constant_input(size_t i) const {
    return i < constants_.size() ? constants_[i] : nullptr;
  }
  // Integer contents known while planning (axes, shapes), widened to int64.
  std::optional<std::vector<int64_t>> constant_ints(size_t i) const;

  // Scratch memory the kernel gets as KernelArgs::workspace, 64-byte aligned, not zeroed; part of
  // the plan's arena. Call it from `make`.
  void request_workspace(size_t bytes) { workspace_bytes_ = bytes; }
  size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  const OpDef* def_;
  const Node* node_;
  std::vector<TensorSpec> inputs_;
  std::vector<TensorSpec> outputs_;
  std::vector<const void*> constants_;
  size_t workspace_bytes_ = 0;
};

// Addresses of one run: null for absent inputs and outputs; 64-byte aligned unless the tensor
// comes from the user.
struct KernelArgs {
  const void* const* in;
  void* const* out;
  void* workspace;

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
  // For operators that only look at their first input differently: the byte offset of each output
  // inside input 0; nullopt = this node is no view, use the next kernel.
  std::function<std::optional<std::vector<int64_t>>(const NodeSpec&)> view = nullptr;
};

// A view kernel whose single output is all of input 0 (Reshape, Identity, ...).
Kernel whole_input_view();

}  // namespace ortrain
