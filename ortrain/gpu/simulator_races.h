// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// Finds accesses of a simulated kernel that a device puts in no order: two threads at one byte, one
// of which writes, without a barrier between them. Device code is compiled with -fsanitize=thread,
// whose calls come here in place of that sanitizer's library; blocks run one after another then.
//
// What orders: barriers of a block for its threads, barriers of a warp for its lanes, and fences of
// the device between blocks, where both have made one. Exchanges between lanes and matrix units
// order nothing. Atomics do not conflict with each other. Shared memory that a block reads and has
// not written is reported too.
namespace ortrain::gpu::simulator {

// Whether this build looks at accesses.
#if defined(ORTRAIN_GPU_RACES)
inline constexpr bool kFindsRaces = true;
#else
inline constexpr bool kFindsRaces = false;
#endif

// Where a thread of the device is, as far as its accesses are ordered.
struct AccessPlace {
  uint32_t block = 0;
  uint16_t thread = 0, warp = 0;
  uint32_t block_barriers = 0, warp_barriers = 0;  // passed
  uint32_t fences = 0;                             // of the block
};

// The block that runs on this operating system thread, told by the simulator.
void begin_launch();
void begin_block(const void* shared, size_t shared_bytes);
// Accesses count from here on; those to the thread's own stack are left out.
void enter_thread(const AccessPlace* place, const void* stack, size_t stack_bytes);
void leave_thread();
// Accesses that the simulator makes for a thread.
void note_access(const void* address, size_t bytes, bool writes);
void note_fence();

// What was found first since the last call; empty: nothing.
std::string take_race();

}  // namespace ortrain::gpu::simulator
