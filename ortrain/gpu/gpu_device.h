// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ortrain/runtime/device.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {

// What the kernels of this build are compiled for: "cuda", "hip" or "simulator".
std::string_view platform();
// How many devices there are; the simulator has one.
int device_count();
// Throws DeviceError when there is no such device.
Device& device(int index);
// The kernels for that device: those of ortrain/ops/*/*.cu; views; for operators that have no
// kernel here, or whose kernels refuse a node, the CPU's on copies in host memory ("host").
const KernelRegistry& kernels(int index);

// Where the devices get memory: PyTorch's caching allocator in Python, so that both share it. Null:
// the driver's own pool. Takes the device's index, bytes and stream.
using Allocator = std::function<std::shared_ptr<Block>(int, size_t, void*)>;
// For the results of runs, as Device::results; null: from the other one.
using ResultAllocator = std::function<std::vector<std::shared_ptr<Block>>(
    int, std::span<const TensorSpec* const>, void*)>;
void set_allocator(Allocator allocator, ResultAllocator results = nullptr);

// The calling thread's current device; 0 where there is none.
int current_device();
// Multiprocessors of the device, for launches that want as many blocks as run at a time.
int multiprocessors(int index);
// Bytes of shared memory that a block can ask for.
int64_t shared_memory_per_block(int index);
// Ten times major plus minor: 80, 90. The simulator has 80, AMD's devices 0.
int compute_capability(int index);

}  // namespace ortrain::gpu

namespace ortrain {
// Generated at build time: calls every register_<stem> of ortrain/ops/*/*.cu.
void register_all_gpu_kernels(KernelRegistry& registry);
}  // namespace ortrain
