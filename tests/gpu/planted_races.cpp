// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Kernels with a mistake each, which the simulator has to find where it looks at accesses, and the
// same without, of which it has to say nothing.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/async_copy.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/reduce.h"

namespace ortrain::gpu {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kThreads = 64;

std::string found(const std::function<void()>& run) {
  std::string what;
  for (const auto order : {simulator::ThreadOrder::ascending, simulator::ThreadOrder::descending}) {
    simulator::set_thread_order(order);
    try {
      run();
    } catch (const Error& error) {
      what = error.what();
    }
  }
  simulator::set_thread_order(simulator::ThreadOrder::ascending);
  return what;
}

// Reads what the neighbour wrote; kBarrier: 0 none, 1 of the warp, 2 of the block.
template <int kBarrier, int kNeighbour>
__global__ void reverse_in_shared(int* out) {
  __shared__ int values[kThreads];
  const int t = static_cast<int>(threadIdx.x);
  values[t] = t;
  if (kBarrier == 1) warp_barrier();
  if (kBarrier == 2) __syncthreads();
  out[t] = values[t ^ kNeighbour];
}

template <int kBarrier, int kNeighbour>
std::string reversed() {
  std::vector<int> out(kThreads);
  return found([&] {
    launch(reverse_in_shared<kBarrier, kNeighbour>, {.threads = kThreads}, nullptr, out.data());
  });
}

TEST(PlantedRaces, ABarrierIsMissing) {
  // Whoever runs first reads what is not there yet.
  const auto race = AllOf(HasSubstr("shared memory"),
                          AnyOf(HasSubstr("no barrier"), HasSubstr("no thread has written")));
  EXPECT_THAT((reversed<0, 1>()), race);
  EXPECT_THAT((reversed<0, 32>()), race);
  EXPECT_EQ((reversed<1, 1>()), "");
  EXPECT_THAT((reversed<1, 32>()), race) << "a warp's, for two warps";
  EXPECT_EQ((reversed<2, 1>()), "");
  EXPECT_EQ((reversed<2, 32>()), "");
}

__global__ void exchange_for_a_barrier(int* out) {
  __shared__ int values[kThreads];
  const int t = static_cast<int>(threadIdx.x);
  values[t] = exchange_xor(t, 1);
  const bool any = any_lane(values[t] > 0);
  out[t] = values[t ^ 1] + (any ? 1 : 0);
}

TEST(PlantedRaces, ExchangesOrderNothing) {
  std::vector<int> out(kThreads);
  EXPECT_THAT(
      found([&] { launch(exchange_for_a_barrier, {.threads = kThreads}, nullptr, out.data()); }),
      HasSubstr("no barrier"));
}

// The next round writes while others still read.
template <bool kTwoBarriers>
__global__ void rounds(int* out) {
  __shared__ int value;
  for (int round = 0; round < 3; ++round) {
    if (threadIdx.x == 0) value = round;
    __syncthreads();
    out[threadIdx.x] += value;
    if (kTwoBarriers) __syncthreads();
  }
}

TEST(PlantedRaces, ASecondBarrierIsMissing) {
  std::vector<int> out(kThreads);
  EXPECT_THAT(found([&] { launch(rounds<false>, {.threads = kThreads}, nullptr, out.data()); }),
              HasSubstr("no barrier"));
  EXPECT_EQ(found([&] { launch(rounds<true>, {.threads = kThreads}, nullptr, out.data()); }), "");
}

template <bool kAtomic>
__global__ void count(int32_t* sum) {
  if (kAtomic) {
    atomic_add(sum, 1);
  } else {
    *sum += 1;
  }
}

TEST(PlantedRaces, BlocksWriteToOnePlace) {
  int32_t sum = 0;
  EXPECT_THAT(found([&] { launch(count<false>, {.blocks = 2, .threads = 32}, nullptr, &sum); }),
              AllOf(HasSubstr("global memory"), HasSubstr("no barrier")));
  EXPECT_EQ(found([&] { launch(count<true>, {.blocks = 2, .threads = 32}, nullptr, &sum); }), "");
}

// A block reads what another one wrote.
template <bool kFence>
__global__ void last_block_sums(int32_t* parts, int32_t* done, int32_t* sum) {
  if (threadIdx.x != 0) return;
  parts[blockIdx.x] = 1;
  if (kFence) device_fence();
  const int32_t before = atomic_add(done, 1);
  if (kFence) device_fence();
  if (before + 1 < static_cast<int32_t>(gridDim.x)) return;
  *sum = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) *sum += parts[b];
}

TEST(PlantedRaces, BlocksAreOrderedByFences) {
  std::vector<int32_t> parts(4);
  int32_t done = 0, sum = 0;
  const auto run = [&](auto kernel) {
    return found([&] {
      done = 0;
      launch(kernel, {.blocks = 4, .threads = 32}, nullptr, parts.data(), &done, &sum);
    });
  };
  EXPECT_THAT(run(last_block_sums<false>), HasSubstr("no barrier"));
  EXPECT_EQ(run(last_block_sums<true>), "");
  EXPECT_EQ(sum, 4);
}

// A copy that is begun while others read what was there.
template <bool kBarrier>
__global__ void copies(const float* in, float* out) {
  __shared__ float tile[kThreads];
  const int t = static_cast<int>(threadIdx.x);
  tile[t] = 1;
  __syncthreads();
  float sum = tile[kThreads - 1 - t];
  if (kBarrier) __syncthreads();
  copy_float(tile + t, in + t, true);
  end_copy_group();
  wait_for_copies<0>();
  __syncthreads();
  sum += tile[kThreads - 1 - t];
  out[t] = sum;
}

TEST(PlantedRaces, ACopyBeginsTooEarly) {
  const std::vector<float> in(kThreads, 2.0f);
  std::vector<float> out(kThreads);
  const auto run = [&](auto kernel) {
    return found([&] { launch(kernel, {.threads = kThreads}, nullptr, in.data(), out.data()); });
  };
  EXPECT_THAT(run(copies<false>), HasSubstr("no barrier"));
  EXPECT_EQ(run(copies<true>), "");
  EXPECT_EQ(out, std::vector<float>(kThreads, 3.0f));
}

template <bool kWritesAll>
__global__ void reads_unwritten(int* out) {
  __shared__ int values[kThreads];
  const int t = static_cast<int>(threadIdx.x);
  if (kWritesAll || t > 0) values[t] = t;
  __syncthreads();
  out[t] = values[kThreads - 1 - t];
}

TEST(PlantedRaces, SharedMemoryIsReadBeforeItIsWritten) {
  std::vector<int> out(kThreads);
  // Once without the mistake: what a block before left there counts for nothing.
  const auto run = [&](auto kernel) {
    return found([&] { launch(kernel, {.threads = kThreads}, nullptr, out.data()); });
  };
  EXPECT_EQ(run(reads_unwritten<true>), "");
  EXPECT_THAT(run(reads_unwritten<false>), HasSubstr("no thread has written"));
}

__global__ void nothing() {}

TEST(PlantedRaces, LaunchesBeyondTheLimitsOfDevices) {
  EXPECT_THAT(found([] { launch(nothing, {.threads = 1056}, nullptr); }), HasSubstr("1024"));
  EXPECT_THAT(found([] { launch(nothing, {.threads = 32, .blocks_y = 65536}, nullptr); }),
              HasSubstr("65535"));
  EXPECT_THAT(found([] { launch(nothing, {.threads = 32, .shared_bytes = 233 << 10}, nullptr); }),
              HasSubstr("227 KiB"));
}

}  // namespace
}  // namespace ortrain::gpu
