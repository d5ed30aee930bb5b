// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ortrain/base/byte_count.h"
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

  const OpDef& def() const { return *def_; }
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
  void request_workspace(ByteCount bytes) { workspace_bytes_ = bytes; }
  ByteCount workspace_bytes() const { return workspace_bytes_; }
  // What the kernel keeps for as long as the plan, by an estimate, where that is more than a
  // closure of some hundred bytes. Call it from `make`.
  void note_kept(size_t bytes) { kept_bytes_ = bytes; }
  size_t kept_bytes() const { return kept_bytes_; }

 private:
  const OpDef* def_;
  const Node* node_;
  std::vector<TensorSpec> inputs_;
  std::vector<TensorSpec> outputs_;
  std::vector<const void*> constants_;
  ByteCount workspace_bytes_;
  size_t kept_bytes_ = 0;
};

}  // namespace ortrain
