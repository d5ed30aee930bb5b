// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/op_registry.h"

#include <algorithm>
#include <mutex>
#include <tuple>

#include "ortrain/base/error.h"

namespace ortrain {

void OpRegistry::add(OpDef def) {
  auto key = std::make_pair(def.domain, def.name);
  check(def.infer || def.expand, "an operator is inferred or expanded");
  const std::unique_lock lock(mutex_);
  if (def.until > 0) {
    check(static_cast<bool>(def.expand), "an earlier meaning is expanded");
    store_.push_back(std::make_unique<const OpDef>(std::move(def)));
    earlier_.emplace(std::move(key), store_.back().get());
    return;
  }
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
  if (def.expand) {
    throw InvalidModelError(str("operator ", full, " stands for others, which have gradients"));
  }
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

const OpDef& OpRegistry::at(std::string_view domain, std::string_view name, int64_t opset) const {
  const OpDef* newest = find(domain, name);
  if (newest != nullptr && newest->since <= opset) return *newest;
  int64_t first = newest == nullptr ? 0 : newest->since;
  {
    const std::shared_lock lock(mutex_);
    const auto [begin, end] =
        earlier_.equal_range(std::make_pair(std::string(domain), std::string(name)));
    for (auto it = begin; it != end; ++it) {
      const OpDef& def = *it->second;
      if (def.since <= opset && opset <= def.until) return def;
      first = first == 0 ? def.since : std::min<int64_t>(first, def.since);
    }
  }
  if (first == 0) return get(domain, name);  // which throws
  throw UnsupportedError(str("the operator of opset ", opset,
                             " has another meaning than those that are supported, since opset ",
                             first));
}

std::vector<const OpDef*> OpRegistry::select(bool composite) const {
  const std::shared_lock lock(mutex_);
  std::vector<const OpDef*> result;
  for (const auto& [key, def] : defs_) {
    if (static_cast<bool>(def->expand) == composite) result.push_back(def);
  }
  return result;
}

std::vector<const OpDef*> OpRegistry::earlier() const {
  const std::shared_lock lock(mutex_);
  std::vector<const OpDef*> result;
  for (const auto& [key, def] : earlier_) result.push_back(def);
  std::stable_sort(result.begin(), result.end(), [](const OpDef* a, const OpDef* b) {
    return std::tie(a->domain, a->name, a->since) < std::tie(b->domain, b->name, b->since);
  });
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
