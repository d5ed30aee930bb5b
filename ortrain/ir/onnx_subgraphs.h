// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "onnx/onnx-ml.pb.h"
#include "ortrain/ir/graph_assembler.h"
#include "ortrain/ir/onnx_external_data.h"

namespace ortrain {

// Writes branches and loops of an ONNX file out into the graph around them: the branch that an If
// takes, and the body of a Loop or Scan once per step. Conditions and numbers of steps must be
// known when the file is read; UnsupportedError otherwise, and where too much would come of it.
class SubgraphInliner {
 public:
  using LoadNode = std::function<void(onnx::NodeProto&)>;

  // `load_node` adds a node of the file whose names have their values in `assembler`.
  SubgraphInliner(GraphAssembler& assembler, ExternalData& external, LoadNode load_node);

  // Whether a standard operator holds graphs.
  static bool handles(const onnx::NodeProto& node);

  // Adds what the node stands for; `opset` is the file's.
  void load(onnx::NodeProto& node, int64_t opset);

 private:
  using Names = std::map<std::string, std::string, std::less<>>;

  ValueId value_of(const std::string& name) const;
  onnx::GraphProto& body_of(onnx::NodeProto& node, std::string_view attribute) const;
  // Names of what a body holds in all of its steps: the contents of its initializers and constants.
  Names load_constants(onnx::GraphProto& body, const std::string& prefix);
  // One step of a body; the values of its outputs.
  std::vector<ValueId> step(onnx::GraphProto& body, const Names& constants,
                            const std::vector<ValueId>& inputs);
  void load_if(onnx::NodeProto& node);
  void load_loop(onnx::NodeProto& node);
  void load_scan(onnx::NodeProto& node);
  void bind(const onnx::NodeProto& node, const std::vector<ValueId>& values);
  void spend(size_t bytes);
  std::string fresh_prefix();

  GraphAssembler& assembler_;
  ExternalData& external_;
  LoadNode load_node_;
  int64_t instances_ = 0;
  int64_t left_;  // of what may be written out
};

}  // namespace ortrain
