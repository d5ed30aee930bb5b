// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ortrain/ir/graph.h"
#include "ortrain/ir/op_def.h"

namespace ortrain {

// Reads the attributes of a node, with the defaults of its operator's schema.
class AttributeReader {
 public:
  AttributeReader(const OpDef& def, const Node& node) : def_(&def), node_(&node) {}

  bool has(const std::string& name) const;  // given, or has a default
  // Each throws InvalidModelError when the attribute is absent or of another kind.
  int64_t int_(const std::string& name) const;
  double float_(const std::string& name) const;
  const std::string& string_(const std::string& name) const;
  const std::vector<int64_t>& ints(const std::string& name) const;
  const std::vector<double>& floats(const std::string& name) const;
  const std::vector<std::string>& strings(const std::string& name) const;
  const TensorData& tensor(const std::string& name) const;
  // Absent without default: nullopt.
  std::optional<std::vector<int64_t>> optional_ints(const std::string& name) const;
  std::optional<int64_t> optional_int(const std::string& name) const;

 private:
  const Attribute* find(const std::string& name) const;
  template <typename T>
  const T& get(const std::string& name) const;

  const OpDef* def_;
  const Node* node_;
};

}  // namespace ortrain
