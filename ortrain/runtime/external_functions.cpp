// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/external_functions.h"

#include "ortrain/base/error.h"

namespace ortrain {

ExternalFunctions& ExternalFunctions::instance() {
  // Never destroyed: plans may outlive static destruction.
  static auto* const functions = new ExternalFunctions();
  return *functions;
}

void ExternalFunctions::add(const std::string& key,
                            std::shared_ptr<const ExternalFunction> function) {
  std::lock_guard lock(mutex_);
  if (!functions_.emplace(key, std::move(function)).second) {
    throw InternalError(str("an external function '", key, "' is there already"));
  }
}

void ExternalFunctions::remove(const std::string& key) {
  std::shared_ptr<const ExternalFunction> removed;  // goes after the lock: its end may run any code
  std::lock_guard lock(mutex_);
  const auto found = functions_.find(key);
  if (found == functions_.end()) return;
  removed = std::move(found->second);
  functions_.erase(found);
}

std::shared_ptr<const ExternalFunction> ExternalFunctions::find(const std::string& key) const {
  std::lock_guard lock(mutex_);
  const auto found = functions_.find(key);
  return found == functions_.end() ? nullptr : found->second;
}

}  // namespace ortrain
