// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "ortrain/runtime/kernel_registry.h"
#include "python/src/dlpack_abi.h"

namespace ortrain::python {

// A device as its users name it, and what runs on it.
struct NamedDevice {
  std::string name;  // "cpu", "cuda:0", "simulator"
  const KernelRegistry* kernels;
  dlpack::Device place{dlpack::kCpu, 0};  // of its tensors; the simulator's are on the CPU
};

// Throws DeviceError when this build or machine has no such device. The first use of a GPU gives
// the engine PyTorch's allocator.
NamedDevice find_device(const std::string& name);

// Where the tensors of a device are; null: the host.
dlpack::Device place_of(const Device* device);

// "cpu", "cuda:1"
std::string name_of(dlpack::Device place);

// PyTorch's current stream there; null on the CPU.
void* current_stream(dlpack::Device place);

}  // namespace ortrain::python
