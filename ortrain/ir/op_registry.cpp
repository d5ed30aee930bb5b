// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/op_registry.h"

#include "ortrain/base/error.h"

namespace ortrain {

void OpRegistry::add(OpDef def) {
  auto key = std::make_pair(def.domain, def.name);
  check(static_cast<bool>(def.infer), "an operator needs an inference function");
  if (defs_.contains(key)) {
    throw InternalError(str("operator ", def.domain, "::", def.name, " is registered twice"));
  }
  defs_.emplace(std::move(key), std::move(def));
}

const OpDef* OpRegistry::find(std::string_view domain, std::string_view name) const {
  if (domain == "ai.onnx") domain = "";
  auto found = defs_.find(std::make_pair(std::string(domain), std::string(name)));
  return found == defs_.end() ? nullptr : &found->second;
}

const OpDef& OpRegistry::get(std::string_view domain, std::string_view name) const {
  const OpDef* def = find(domain, name);
  if (def == nullptr) {
    throw UnsupportedError(str("operator ", domain.empty() ? "" : str(domain, "::"), name,
                               " is not known"));
  }
  return *def;
}

std::vector<const OpDef*> OpRegistry::all() const {
  std::vector<const OpDef*> result;
  for (const auto& [key, def] : defs_) result.push_back(&def);
  return result;
}

const OpRegistry& op_registry() {
  static const OpRegistry* const registry = [] {
    auto* filled = new OpRegistry();
    register_all_ops(*filled);
    return filled;
  }();
  return *registry;
}

}  // namespace ortrain
