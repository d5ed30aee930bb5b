// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/kernel_registry.h"

#include <mutex>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

std::pair<std::string, std::string> split_name(std::string_view op) {
  const size_t colons = op.find("::");
  if (colons == std::string_view::npos) return {"", std::string(op)};
  return {std::string(op.substr(0, colons)), std::string(op.substr(colons + 2))};
}

// Why `kernel` does not take the node; nullopt = it does.
std::optional<std::string> refusal(const Kernel& kernel, const NodeSpec& spec) {
  if (!kernel.types.empty() && spec.num_inputs() > 0) {
    for (size_t i = 0; i < spec.num_inputs(); ++i) {
      if (!spec.has_input(i)) continue;
      if (!kernel.types.contains(spec.input(i).dtype)) {
        return str("no ", name_of(spec.input(i).dtype));
      }
      break;
    }
  }
  if (kernel.why_not) {
    if (std::optional<std::string> reason = kernel.why_not(spec)) return reason;
  }
  if (!kernel.make && !(kernel.view && kernel.view(spec))) return "not a view";
  return std::nullopt;
}

}  // namespace

void KernelRegistry::add(std::string_view op, std::vector<Kernel> kernels) {
  auto key = split_name(op);
  const std::unique_lock lock(mutex_);
  if (kernels_.contains(key)) throw InternalError(str("kernels of ", op, " are registered twice"));
  kernels_.emplace(std::move(key), std::move(kernels));
}

const std::vector<Kernel>& KernelRegistry::find(std::string_view domain,
                                                std::string_view name) const {
  static const std::vector<Kernel> kNone;
  const std::shared_lock lock(mutex_);
  auto found = kernels_.find(std::make_pair(std::string(domain), std::string(name)));
  return found == kernels_.end() ? kNone : found->second;
}

std::vector<std::string> KernelRegistry::operators() const {
  std::vector<std::string> names;
  const std::shared_lock lock(mutex_);
  for (const auto& [key, kernels] : kernels_) {
    names.push_back(key.first.empty() ? key.second : key.first + "::" + key.second);
  }
  return names;
}

const Kernel* KernelRegistry::select(const NodeSpec& spec,
                                     std::vector<std::string>* refused) const {
  for (const Kernel& kernel : find(spec.node().domain, spec.node().op)) {
    std::optional<std::string> reason = refusal(kernel, spec);
    if (!reason) return &kernel;
    if (refused != nullptr) refused->push_back(str(kernel.name, ": ", *reason));
  }
  return nullptr;
}

const Kernel* KernelRegistry::select_named(const NodeSpec& spec, std::string_view name,
                                           std::string* why) const {
  for (const Kernel& kernel : find(spec.node().domain, spec.node().op)) {
    if (kernel.name != name) continue;
    std::optional<std::string> reason = refusal(kernel, spec);
    if (!reason) return &kernel;
    if (why != nullptr) *why = *reason;
    return nullptr;
  }
  if (why != nullptr) *why = "there is no kernel of this name";
  return nullptr;
}

KernelRegistry& mutable_cpu_kernels() {
  static KernelRegistry* const registry = [] {
    auto* filled = new KernelRegistry();
    register_all_cpu_kernels(*filled);
    return filled;
  }();
  return *registry;
}

const KernelRegistry& cpu_kernels() { return mutable_cpu_kernels(); }

}  // namespace ortrain
