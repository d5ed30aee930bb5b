// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/simulator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/async_copy.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/reduce.h"

namespace ortrain::gpu {
namespace {

using simulator::ThreadOrder;

class Simulator : public ::testing::TestWithParam<ThreadOrder> {
 protected:
  void SetUp() override { simulator::set_thread_order(GetParam()); }
  void TearDown() override { simulator::set_thread_order(ThreadOrder::ascending); }
};

__global__ void number_items(int64_t count, int64_t* items) {
  for_each_item(count, [&](int64_t i) { items[i] += i; });
}

TEST_P(Simulator, EveryItemOnce) {
  std::vector<int64_t> items(100003, 7);
  launch(number_items, gpu::items(100003, 64, 50), nullptr, int64_t{100003}, items.data());
  for (size_t i = 0; i < items.size(); ++i) ASSERT_EQ(items[i], static_cast<int64_t>(i) + 7);
}

__global__ void reverse_in_block(const int* in, int* out) {
  __shared__ int kept[256];
  const int i = static_cast<int>(threadIdx.x);
  const int base = static_cast<int>(blockIdx.x * blockDim.x);
  kept[i] = in[base + i];
  __syncthreads();
  out[base + i] = kept[static_cast<int>(blockDim.x) - 1 - i];
}

TEST_P(Simulator, BarriersOrderSharedMemory) {
  std::vector<int> in(1024), out(1024);
  std::iota(in.begin(), in.end(), 0);
  launch(reverse_in_block, {.blocks = 4, .threads = 256}, nullptr, in.data(), out.data());
  for (int i = 0; i < 1024; ++i)
    ASSERT_EQ(out[static_cast<size_t>(i)], i / 256 * 256 + 255 - i % 256);
}

// Copies two groups of four floats per thread; reads the first after a wait that lets `kLeft` open.
template <int kLeft>
__global__ void copy_groups(const float* in, float* out) {
  float* const kept = dynamic_shared<float>();
  float* const own = kept + threadIdx.x * 8;
  copy_16_bytes(own, in + threadIdx.x * 8);
  end_copy_group();
  copy_16_bytes(own + 4, in + threadIdx.x * 8 + 4, threadIdx.x % 2 == 0);
  end_copy_group();
  wait_for_copies<kLeft>();
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 8 + i] = own[i];
  wait_for_copies<0>();
  for (int i = 4; i < 8; ++i) out[threadIdx.x * 8 + i] = own[i];
}

TEST_P(Simulator, CopiesArriveWhenTheyAreWaitedFor) {
  alignas(16) float in[64 * 8];
  float out[64 * 8];
  std::iota(in, in + 64 * 8, 1.0f);
  const LaunchShape shape{.blocks = 1, .threads = 64, .shared_bytes = sizeof(in)};
  launch(copy_groups<1>, shape, nullptr, in, out);
  for (int i = 0; i < 64 * 8; ++i) {
    const bool is_there = i % 8 < 4 || i / 8 % 2 == 0;
    ASSERT_EQ(out[i], is_there ? in[i] : 0.0f) << i;
  }
  // A wait too few: what has not arrived is no number.
  launch(copy_groups<2>, shape, nullptr, in, out);
  for (int i = 0; i < 64 * 8; ++i) {
    ASSERT_EQ(std::isnan(out[i]), i % 8 < 4) << i;
  }
}

__global__ void copy_from_odd_place(const float* in) {
  copy_16_bytes(dynamic_shared<float>(), in + 1);
}

TEST_P(Simulator, RefusesCopiesFromOddPlaces) {
  alignas(16) const float in[8] = {};
  EXPECT_THROW(launch(copy_from_odd_place,
                      LaunchShape{.blocks = 1, .threads = 32, .shared_bytes = 64}, nullptr, in),
               InternalError);
}

__global__ void sum_blocks(const double* in, double* out, int64_t size) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < size; i += blockDim.x) sum += in[i];
  const double first = block_sum(sum);
  const double second = block_sum(first);  // again at once
  const double most = block_reduce(static_cast<double>(threadIdx.x), 0.0, Max());
  if (threadIdx.x == 0) {
    out[0] = first;
    out[1] = second;
    out[2] = most;
  }
}

TEST_P(Simulator, SumsOfBlocks) {
  for (unsigned threads : {32u, 64u, 256u, 1024u}) {
    std::vector<double> in(5000);
    std::iota(in.begin(), in.end(), 1.0);
    std::vector<double> out(3);
    launch(sum_blocks, {.threads = threads}, nullptr, in.data(), out.data(), int64_t{5000});
    EXPECT_EQ(out[0], 5000.0 * 5001.0 / 2);
    EXPECT_EQ(out[1], out[0] * threads);
    EXPECT_EQ(out[2], threads - 1.0);
  }
}

__global__ void count_in_shared(int* out) {
  int* counter = dynamic_shared<int>();
  if (threadIdx.x == 0) *counter = 0;
  __syncthreads();
  atomic_add(counter, static_cast<int>(threadIdx.x));
  atomic_max(out + 1, static_cast<int>(threadIdx.x));
  __syncthreads();
  if (threadIdx.x == 0) atomic_add(out, *counter);
}

TEST_P(Simulator, AtomicsAndDynamicSharedMemory) {
  std::vector<int> out(2);
  launch(count_in_shared, {.blocks = 3, .threads = 128, .shared_bytes = sizeof(int)}, nullptr,
         out.data());
  EXPECT_EQ(out[0], 3 * 127 * 64);
  EXPECT_EQ(out[1], 127);
}

__global__ void leave_early(int* out) {
  if (threadIdx.x >= 40) return;  // the second warp has 8 threads left
  __syncthreads();
  out[threadIdx.x] = 1;
}

TEST_P(Simulator, ThreadsThatLeaveAreNotWaitedFor) {
  std::vector<int> out(64);
  launch(leave_early, {.threads = 64}, nullptr, out.data());
  EXPECT_EQ(std::accumulate(out.begin(), out.end(), 0), 40);
}

__global__ void wait_for_nobody(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    exchange_xor(*out, 1);
    __syncthreads();
    __syncthreads();
  }
}

__global__ void half_a_warp_exchanges(int* out) {
  if (threadIdx.x % 2 == 0) {
    *out = exchange_xor(1, 2);
  } else {
    __syncthreads();
  }
}

TEST_P(Simulator, BarrierThatOthersDoNotReach) {
  int out = 0;
  EXPECT_THROW(launch(half_a_warp_exchanges, {.threads = 64}, nullptr, &out), InternalError);
  // Threads that have left count no more: no deadlock.
  EXPECT_NO_THROW(launch(wait_for_nobody, {.threads = 64}, nullptr, &out));
}

TEST_P(Simulator, SizesOfBlocks) {
  int out = 0;
  EXPECT_THROW(launch(leave_early, {.threads = 48}, nullptr, &out), InternalError);
  EXPECT_THROW(launch(leave_early, {.threads = 2048}, nullptr, &out), InternalError);
  EXPECT_NO_THROW(launch(leave_early, {.blocks = 0}, nullptr, &out));
}

INSTANTIATE_TEST_SUITE_P(Orders, Simulator,
                         ::testing::Values(ThreadOrder::ascending, ThreadOrder::descending,
                                           ThreadOrder::shuffled));

__global__ void reads_without_barrier(int* shared, int* out) {
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  out[threadIdx.x] = shared[(threadIdx.x + 1) % blockDim.x];
}

TEST(ThreadOrders, ShowAMissingBarrier) {
  std::vector<std::vector<int>> results;
  for (ThreadOrder order : {ThreadOrder::ascending, ThreadOrder::descending}) {
    simulator::set_thread_order(order);
    std::vector<int> shared(64, -1), out(64);
    launch(reads_without_barrier, {.threads = 64}, nullptr, shared.data(), out.data());
    results.push_back(out);
  }
  simulator::set_thread_order(ThreadOrder::ascending);
  EXPECT_NE(results[0], results[1]);
}

}  // namespace
}  // namespace ortrain::gpu
