// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ortrain/runtime/device.h"
#include "ortrain/runtime/kernel.h"

namespace ortrain {

// The kernels of one provider, per operator, best first. Thread-safe; what it returns stays valid.
class KernelRegistry {
 public:
  explicit KernelRegistry(Device& device = host_device()) : device_(&device) {}
  // Whose memory the kernels work on.
  Device& device() const { return *device_; }

  // Standard operators: "Softmax"; ours: "ortrain::Softmax". Throws InternalError if there already.
  void add(std::string_view op, std::vector<Kernel> kernels);
  // Best first; empty when there is none.
  const std::vector<Kernel>& find(std::string_view domain, std::string_view name) const;
  // "Softmax", "ortrain::Attention": every operator that has kernels.
  std::vector<std::string> operators() const;

  // The first kernel that takes the node. `refused` gets "name: reason" of those before it.
  // Null if none does.
  const Kernel* select(const NodeSpec& spec, std::vector<std::string>* refused = nullptr) const;
  // The kernel of this name; null if there is none or it refuses (reason in *why).
  const Kernel* select_named(const NodeSpec& spec, std::string_view name,
                             std::string* why = nullptr) const;

 private:
  Device* device_;
  mutable std::shared_mutex mutex_;
  std::map<std::pair<std::string, std::string>, std::vector<Kernel>, std::less<>> kernels_;
};

// Generated at build time: calls every register_<stem> of ortrain/ops/*/*_cpu.cpp.
void register_all_cpu_kernels(KernelRegistry& registry);

// The CPU provider's registry, filled on first use.
const KernelRegistry& cpu_kernels();
// The same, for what is added at run time.
KernelRegistry& mutable_cpu_kernels();

}  // namespace ortrain
