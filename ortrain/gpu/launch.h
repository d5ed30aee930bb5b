// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/gpu/device_code.h"
#include "ortrain/runtime/fault.h"
#include "ortrain/runtime/kernel.h"

namespace ortrain::gpu {

// Blocks and threads of one launch.
struct LaunchShape {
  unsigned blocks = 1;
  unsigned threads = 256;  // a multiple of kWarpSize, 1024 at most
  size_t shared_bytes = 0;
  unsigned blocks_y = 1;
  unsigned blocks_z = 1;
};

inline bool has_blocks(int64_t blocks) { return blocks >= 0 && blocks < int64_t{1} << 31; }

// As many blocks, which a launch can have: throws UnsupportedError from 2^31 on.
inline unsigned block_count(int64_t blocks) {
  if (!has_blocks(blocks)) {
    throw UnsupportedError(str("a launch of ", blocks, " blocks; there can be 2^31 - 1"));
  }
  return static_cast<unsigned>(blocks);
}

// Throws DeviceError with the runtime's words when `code` is no success.
void check_device_call(int code, const char* what);

// More shared memory than this is given only to kernels that ask for it.
inline constexpr size_t kSharedBytesOfAll = size_t{48} << 10;
// Lets blocks of the kernel have `bytes` of it on the current device, or more where that has been
// asked for before: another thread may be about to launch. Throws DeviceError.
void give_shared_memory(const void* kernel, size_t bytes);

// Whether an argument of a launch has more bits than the kernel's parameter.
template <class Parameter, class Arg>
inline constexpr bool kLosesBits =
    std::is_integral_v<Parameter> && std::is_integral_v<Arg> && sizeof(Parameter) < sizeof(Arg);

// Puts kernel(args...) onto the stream. Nothing to do for no blocks. Throws DeviceError.
template <class... Parameters, class... Args>
void launch(void (*kernel)(Parameters...), const LaunchShape& shape, void* stream, Args&&... args) {
  static_assert((!kLosesBits<Parameters, std::remove_cvref_t<Args>> && ...),
                "narrow_checked, or a wider parameter");
  if (shape.blocks == 0 || shape.blocks_y == 0 || shape.blocks_z == 0) return;
#if defined(__HIPCC__)
  // The launch's own result: the last error of the thread may be somebody else's.
  std::tuple<Parameters...> values(static_cast<Parameters>(args)...);
  std::apply(
      [&](auto&... value) {
        void* addresses[] = {const_cast<void*>(static_cast<const void*>(&value))..., nullptr};
        check_device_call(
            static_cast<int>(hipLaunchKernel(reinterpret_cast<const void*>(kernel),
                                             dim3(shape.blocks, shape.blocks_y, shape.blocks_z),
                                             dim3(shape.threads), addresses, shape.shared_bytes,
                                             static_cast<hipStream_t>(stream))),
            "launching a kernel");
      },
      values);
#elif defined(__CUDACC__)
  if (shape.shared_bytes > kSharedBytesOfAll) {
    give_shared_memory(reinterpret_cast<const void*>(kernel), shape.shared_bytes);
  }
  // The launch's own result: the last error of the thread may be somebody else's.
  std::tuple<Parameters...> values(static_cast<Parameters>(args)...);
  std::apply(
      [&](auto&... value) {
        void* addresses[] = {const_cast<void*>(static_cast<const void*>(&value))..., nullptr};
        check_device_call(
            static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                                              dim3(shape.blocks, shape.blocks_y, shape.blocks_z),
                                              dim3(shape.threads), addresses, shape.shared_bytes,
                                              static_cast<cudaStream_t>(stream))),
            "launching a kernel");
      },
      values);
#else
  (void)stream;
  // By value, as a device takes them.
  simulator::submit([kernel, shape, parameters = std::tuple<Parameters...>(args...)] {
    simulator::run({shape.blocks, shape.blocks_y, shape.blocks_z}, shape.threads,
                   shape.shared_bytes, [&] { std::apply(kernel, parameters); });
  });
#endif
}

// Threads of a block of `items`, by which kernels for it bound their launches.
inline constexpr unsigned kItemThreads = 256;

// Blocks for a loop over `count` items in strides of the whole grid (see `for_each_item`): enough
// to fill any device, so that index arithmetic is shared among many items.
inline LaunchShape items(int64_t count, unsigned threads = kItemThreads,
                         int64_t max_blocks = 4096) {
  return {
      .blocks = block_count(std::clamp<int64_t>((count + threads - 1) / threads, 0, max_blocks)),
      .threads = threads};
}

// Calls body(i) for every i < count, once in the whole grid.
template <class Body>
ORTRAIN_DEVICE void for_each_item(int64_t count, const Body& body) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) body(i);
}

// Threads of a block that works on rows of `columns` values: a power of two of warps.
inline unsigned row_threads(int64_t columns, int64_t per_thread = 4, unsigned most = 1024) {
  unsigned threads = kWarpSize;
  while (threads < most && int64_t{threads} * per_thread < columns) threads *= 2;
  return threads;
}

// An array that goes to a kernel by value.
template <class T, int N>
struct DeviceArray {
  T values[N] = {};
  ORTRAIN_HOST_DEVICE T& operator[](int i) { return values[i]; }
  ORTRAIN_HOST_DEVICE const T& operator[](int i) const { return values[i]; }
};

// Of several tensors that the blocks of a launch take one after the other, the one of this block:
// the last of `count` whose first_block is not behind it.
template <class T, int N>
ORTRAIN_DEVICE const T& of_this_block(const DeviceArray<T, N>& all, int count) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (all[middle].first_block <= blockIdx.x ? low : high) = middle;
  }
  return all[low];
}

// Where a kernel reports values that are out of range; see Fault.
struct FaultReporter {
  Fault* slot = nullptr;
  uint32_t step = 0;

  FaultReporter() = default;
  explicit FaultReporter(const KernelArgs& args) : slot(args.fault), step(args.step) {}

  // Only the first one of a run is kept.
  ORTRAIN_DEVICE void report(FaultKind kind, int64_t value, int64_t position, int64_t low,
                             int64_t high, int64_t axis = -1) const {
    if (slot == nullptr) return;
    auto* state = reinterpret_cast<int*>(&slot->kind);
    if (atomic_compare_exchange(state, 0, static_cast<int>(FaultKind::being_written)) != 0) return;
    slot->step = step;
    slot->value = value;
    slot->position = position;
    slot->low = low;
    slot->high = high;
    slot->axis = axis;
    system_fence();
    atomic_exchange(state, static_cast<int>(kind));
  }
  // Makes a negative index count from the end, as ONNX does. Reports one outside of [-size, size),
  // gives 0 for it, and returns false.
  ORTRAIN_DEVICE bool wrap_index(int64_t& index, int64_t position, int64_t size,
                                 int64_t axis = -1) const {
    if (index < -size || index >= size) {
      report(FaultKind::element, index, position, -size, size, axis);
      index = 0;
      return false;
    }
    if (index < 0) index += size;
    return true;
  }
};

}  // namespace ortrain::gpu
