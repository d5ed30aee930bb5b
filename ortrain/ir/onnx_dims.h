// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <set>
#include <string>

#include "onnx/onnx-ml.pb.h"
#include "ortrain/base/dim.h"

namespace ortrain {

// Turns the extents of inputs into Dims. A dim_param that is an expression as Dim::str writes it is
// read as one; any other text becomes a symbol of its own, with a name that expressions can hold.
class ExtentReader {
 public:
  // All dim_params of the graph, so that a made-up symbol is none of them.
  explicit ExtentReader(const onnx::GraphProto& graph);

  // Throws InvalidModelError. `where` names an extent that has neither value nor symbol.
  Dim read(const onnx::TensorShapeProto::Dimension& extent, const std::string& where);

 private:
  Dim read_text(const std::string& text);
  std::string symbol_for(const std::string& text);
  std::string unused(std::string wanted);

  std::set<std::string> taken_;
  std::map<std::string, std::string> symbols_;  // by text
  std::map<std::string, int> counts_;           // of made-up names, by what they begin with
};

}  // namespace ortrain
