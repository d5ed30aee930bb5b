// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "ortrain/base/log.h"
#include "ortrain/gpu/gpu_device.h"

namespace ortrain::gpu {
namespace {

// One node with its operands in host memory, and the lock on them.
struct HostCopy {
  std::mutex mutex;
  KernelFn run;
  std::vector<TensorData> owners;
  std::vector<const void*> in;
  std::vector<void*> out;
  std::vector<size_t> in_bytes;  // 0: absent, or constant and there already
  std::vector<size_t> out_bytes;
  TensorData workspace;
  void* workspace_data = nullptr;
};

void* host_memory(HostCopy& copy, size_t bytes) {
  void* data = nullptr;
  copy.owners.push_back(
      TensorData::allocate(DType::u8, {static_cast<int64_t>(std::max<size_t>(bytes, 1))}, &data));
  return data;
}

KernelFn make_on_host(Device& device, NodeSpec& spec) {
  const Kernel* kernel = cpu_kernels().select(spec);
  if (kernel == nullptr) throw UnsupportedError(spec.context() + "no kernel takes it");
  if (log_enabled("dispatch")) {
    log_line("dispatch", spec.context() + "runs on the host, with copies both ways");
  }
  auto copy = std::make_shared<HostCopy>();
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    const void* known = spec.constant_input(i);
    const bool moves = spec.has_input(i) && known == nullptr;
    copy->in_bytes.push_back(moves ? spec.input(i).bytes() : 0);
    copy->in.push_back(moves ? host_memory(*copy, spec.input(i).bytes()) : known);
  }
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    copy->out_bytes.push_back(spec.has_output(i) ? spec.output(i).bytes() : 0);
    copy->out.push_back(spec.has_output(i) ? host_memory(*copy, spec.output(i).bytes()) : nullptr);
  }
  if (kernel->make) {
    copy->run = kernel->make(spec);
    copy->workspace_data = host_memory(*copy, spec.workspace_bytes().value());
    spec.request_workspace(ByteCount());
  } else {
    const std::vector<int64_t> offsets = *kernel->view(spec);
    copy->run = [offsets, bytes = copy->out_bytes](const KernelArgs& args) {
      for (size_t i = 0; i < bytes.size(); ++i) {
        if (bytes[i] > 0) {
          std::memcpy(args.out[i], static_cast<const char*>(args.in[0]) + offsets[i], bytes[i]);
        }
      }
    };
  }
  return [&device, copy](const KernelArgs& args) {
    const std::lock_guard lock(copy->mutex);
    for (size_t i = 0; i < copy->in.size(); ++i) {
      if (copy->in_bytes[i] == 0) continue;
      device.download(const_cast<void*>(copy->in[i]), args.in[i], copy->in_bytes[i], args.stream);
    }
    KernelArgs on_host = args;
    on_host.in = copy->in.data();
    on_host.out = copy->out.data();
    on_host.workspace = copy->workspace_data;
    copy->run(on_host);
    for (size_t i = 0; i < copy->out.size(); ++i) {
      if (copy->out_bytes[i] == 0) continue;
      device.upload(args.out[i], copy->out[i], copy->out_bytes[i], args.stream);
    }
  };
}

Kernel host_kernel(Device& device) {
  Kernel kernel{.name = "host"};
  kernel.waits = true;
  kernel.why_not = [](const NodeSpec& spec) -> std::optional<std::string> {
    if (cpu_kernels().select(spec) != nullptr) return std::nullopt;
    return "the CPU has no kernel for it either";
  };
  kernel.make = [&device](NodeSpec& spec) { return make_on_host(device, spec); };
  return kernel;
}

KernelRegistry* make_kernels(Device& device) {
  KernelRegistry own(device);
  register_all_gpu_kernels(own);
  auto* all = new KernelRegistry(device);
  std::map<std::string, std::vector<Kernel>> merged;
  const auto split = [](const std::string& op) {
    const size_t colons = op.find("::");
    return colons == std::string::npos
               ? std::pair<std::string, std::string>("", op)
               : std::pair<std::string, std::string>(op.substr(0, colons), op.substr(colons + 2));
  };
  for (const std::string& op : cpu_kernels().operators()) {
    const auto [domain, name] = split(op);
    for (const Kernel& kernel : cpu_kernels().find(domain, name)) {
      if (!kernel.make) merged[op].push_back(kernel);  // a view is one on every device
    }
    merged[op];
  }
  for (const std::string& op : own.operators()) {
    const auto [domain, name] = split(op);
    for (const Kernel& kernel : own.find(domain, name)) merged[op].push_back(kernel);
  }
  for (auto& [op, kernels] : merged) {
    kernels.push_back(host_kernel(device));
    all->add(op, std::move(kernels));
  }
  return all;
}

}  // namespace

const KernelRegistry& kernels(int index) {
  static std::mutex mutex;
  static auto* const registries = new std::map<int, KernelRegistry*>();
  const std::lock_guard lock(mutex);
  KernelRegistry*& registry = (*registries)[index];
  if (registry == nullptr) registry = make_kernels(device(index));
  return *registry;
}

}  // namespace ortrain::gpu
