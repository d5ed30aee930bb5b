// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs device code on the host, for tests without a GPU: the blocks of a launch in parallel, the
// threads of a block one after another, each on a stack of its own, changing places at barriers. It
// shows that indices, barriers and arithmetic are right, not how fast anything is, nor what memory
// of a real device does between barriers.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
// `#pragma unroll` is for the others.
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
// Threads of a block share an operating system thread.
#define __shared__ static thread_local

namespace ortrain::gpu::simulator {

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

// What a thread of the device knows about itself.
struct Coordinates {
  Index3 thread, block, block_size, grid_size;
};
extern thread_local Coordinates coordinates;

// The order in which the threads of a block run between barriers: code that misses a barrier gives
// other results in another order.
enum class ThreadOrder { ascending, descending, shuffled };
void set_thread_order(ThreadOrder order);

// Runs body() once per thread. Throws InternalError when threads of a block wait for others that
// never come, and what body throws.
void run(Index3 grid, unsigned threads, size_t shared_bytes, const std::function<void()>& body);

// A launch: runs now, or is kept by the recording of this thread.
void submit(std::function<void()> work);
// While it lives, what this thread submits is kept and does not run.
class Recorder {
 public:
  Recorder();
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  std::vector<std::function<void()>> take();

 private:
  std::vector<std::function<void()>> kept_;
};
bool is_recording();

void block_barrier();
void warp_barrier();
// Whether `value` holds for any thread of the block; a barrier.
bool any_in_block(bool value);
void* dynamic_shared();
// A copy of 4 or 16 bytes that runs while the thread goes on: they arrive when the thread waits for
// the group that the copy is in, and no sooner; until then the place holds NaN. No source: zeros.
// Throws InternalError for addresses that are no multiples of as many bytes.
void copy_later(void* to, const void* from, size_t bytes);
// What was begun since the last call becomes one group.
void end_copy_group();
// Until at most the `left` groups begun last are open.
void wait_for_copies(size_t left);
// Eight bytes of every lane, for exchanges: the caller writes its own, then reads those of `lane`.
uint64_t exchange_bits(uint64_t bits, int lane);

template <class T>
T exchange(T value, int lane) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = exchange_bits(bits, lane);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T, class Op>
T atomic_update(T* address, T value, Op op) {
  std::atomic_ref<T> place(*address);
  T old = place.load();
  while (!place.compare_exchange_weak(old, op(old, value))) {
  }
  return old;
}
template <class T>
T atomic_add(T* address, T value) {
  return atomic_update(address, value, [](T a, T b) { return static_cast<T>(a + b); });
}
template <class T>
T atomic_compare_exchange(T* address, T expected, T desired) {
  std::atomic_ref<T>(*address).compare_exchange_strong(expected, desired);
  return expected;
}
void fence();

}  // namespace ortrain::gpu::simulator

#define threadIdx (::ortrain::gpu::simulator::coordinates.thread)
#define blockIdx (::ortrain::gpu::simulator::coordinates.block)
#define blockDim (::ortrain::gpu::simulator::coordinates.block_size)
#define gridDim (::ortrain::gpu::simulator::coordinates.grid_size)

inline void __syncthreads() { ::ortrain::gpu::simulator::block_barrier(); }
inline int __syncthreads_or(int value) {
  return ::ortrain::gpu::simulator::any_in_block(value != 0) ? 1 : 0;
}
