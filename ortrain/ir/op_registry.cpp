// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/op_registry.h"

#include <mutex>

#include "ortrain/base/error.h"

namespace ortrain {

void OpRegistry::add(OpDef def) {
  auto key = std::make_pair(def.domain, def.name);
  check(static_cast<bool>(def.infer), "an operator needs an inference function");
  const std::unique_lock lock(mutex_);
  if (defs_.contains(key)) {
    throw InternalError(str("operator ", def.domain, "::", def.name, " is registered twice"));
  }
  store_.push_back(std::make_unique<const OpDef>(std::move(def)));
  defs_.emplace(std::move(key), store_.back().get());
}

void OpRegistry::set_gradient(std::string_view domain, std::string_view name,
                              std::function<void(GradContext&)> gradient, bool replace) {
  const OpDef& known = get(domain, name);
  const std::unique_lock lock(mutex_);
  OpDef def = *defs_.at(std::make_pair(known.domain, known.name));  // another thread may replace it
  const std::string full = domain.empty() ? def.name : str(def.domain, "::", def.name);
  if (!def.differentiable) {
    throw InvalidModelError(str("operator ", full, " has no gradient by definition"));
  }
  if (def.gradient && !replace) {
    throw InvalidModelError(str("operator ", full, " has a gradient rule already"));
  }
  def.gradient = std::move(gradient);
  store_.push_back(std::make_unique<const OpDef>(std::move(def)));
  defs_[std::make_pair(store_.back()->domain, store_.back()->name)] = store_.back().get();
}

const OpDef* OpRegistry::find(std::string_view domain, std::string_view name) const {
  if (domain == "ai.onnx") domain = "";
  const std::shared_lock lock(mutex_);
  auto found = defs_.find(std::make_pair(std::string(domain), std::string(name)));
  return found == defs_.end() ? nullptr : found->second;
}

const OpDef& OpRegistry::get(std::string_view domain, std::string_view name) const {
  const OpDef* def = find(domain, name);
  if (def == nullptr) {
    throw UnsupportedError(
        str("operator ", domain.empty() ? "" : str(domain, "::"), name, " is not known"));
  }
  return *def;
}

std::vector<const OpDef*> OpRegistry::all() const {
  const std::shared_lock lock(mutex_);
  std::vector<const OpDef*> result;
  for (const auto& [key, def] : defs_) result.push_back(def);
  return result;
}

OpRegistry& mutable_op_registry() {
  static OpRegistry* const registry = [] {
    auto* filled = new OpRegistry();
    register_all_ops(*filled);
    return filled;
  }();
  return *registry;
}

const OpRegistry& op_registry() { return mutable_op_registry(); }

}  // namespace ortrain
