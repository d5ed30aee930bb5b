// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ortrain/ir/op_def.h"

namespace ortrain {

// All operators, keyed by (domain, name).
class OpRegistry {
 public:
  // Throws InternalError if the operator is there already.
  void add(OpDef def);
  // Null when unknown.
  const OpDef* find(std::string_view domain, std::string_view name) const;
  // Throws UnsupportedError naming the operator.
  const OpDef& get(std::string_view domain, std::string_view name) const;
  // Sorted by domain, then name.
  std::vector<const OpDef*> all() const;

 private:
  std::map<std::pair<std::string, std::string>, OpDef, std::less<>> defs_;
};

// Generated at build time: calls every register_<stem> of ortrain/ops.
void register_all_ops(OpRegistry& registry);

// The process-wide registry, filled on first use.
const OpRegistry& op_registry();

}  // namespace ortrain
