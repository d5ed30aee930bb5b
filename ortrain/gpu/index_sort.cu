// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "ortrain/gpu/index_sort.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/reduce.h"

namespace ortrain::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 8;
constexpr int64_t kPerBlock = int64_t{kThreads} * kPerThread;

// Prefix sums inside of blocks, and the sum of each block.
__global__ void __launch_bounds__(kThreads)
    scan_blocks(int64_t count, const int32_t* counts, int32_t* starts, int32_t* totals) {
  __shared__ int32_t sums[kThreads / kWarpSize];
  const int64_t first = blockIdx.x * kPerBlock + int64_t{threadIdx.x} * kPerThread;
  int32_t values[kPerThread];
  int32_t sum = 0;
  for (int k = 0; k < kPerThread; ++k) {
    values[k] = first + k < count ? counts[first + k] : 0;
    sum += values[k];
  }
  int32_t before = sum_below(sum);
  if (lane() == kWarpSize - 1) sums[warp()] = before + sum;
  __syncthreads();
  for (int w = 0; w < warp(); ++w) before += sums[w];
  if (threadIdx.x == kThreads - 1) totals[blockIdx.x] = before + sum;
  for (int k = 0; k < kPerThread; ++k) {
    if (first + k < count) starts[first + k] = before;
    before += values[k];
  }
}

// Adds the sums of the blocks in front.
__global__ void __launch_bounds__(kThreads)
    scan_totals(int64_t count, const int32_t* totals, int32_t* starts) {
  int32_t mine = 0;
  for (unsigned b = threadIdx.x; b < blockIdx.x; b += blockDim.x) mine += totals[b];
  const int32_t before = block_sum(mine);
  const int64_t first = blockIdx.x * kPerBlock;
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = first + k * kThreads + threadIdx.x;
    if (i < count) starts[i] += before;
  }
  if (blockIdx.x + 1 == gridDim.x && threadIdx.x == 0) {
    starts[count] = before + totals[blockIdx.x];
  }
}

int64_t scan_blocks_of(int64_t count) { return (count + kPerBlock - 1) / kPerBlock; }

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kSortThreads = 512;
constexpr int kSortWarps = kSortThreads / kWarpSize;
constexpr int kRounds = 16;  // positions per thread
constexpr int64_t kTile = int64_t{kSortThreads} * kRounds;
static_assert(kDigits <= kSortThreads);

// One digit of all targets.
struct SortPass {
  int64_t positions, blocks;
  int32_t none;  // the key of positions without a target
  int shift;
  const int32_t* targets;
  const int32_t* from;  // positions in the order of lower digits; null: ascending
  int32_t* to;
  int32_t* counts;        // [digit][block]
  const int32_t* starts;  // of these; null where one block holds all positions

  ORTRAIN_DEVICE int32_t position(int64_t i) const {
    return from != nullptr ? from[i] : static_cast<int32_t>(i);
  }
  ORTRAIN_DEVICE int digit_of(int32_t position) const {
    const int32_t target = targets[position];
    return (target < 0 ? none : target) >> shift & (kDigits - 1);
  }
};

__global__ void __launch_bounds__(kSortThreads) count_digits(SortPass s) {
  __shared__ int32_t counts[kDigits];
  if (threadIdx.x < kDigits) counts[threadIdx.x] = 0;
  __syncthreads();
  for (int round = 0; round < kRounds; ++round) {
    const int64_t i = blockIdx.x * kTile + round * kSortThreads + threadIdx.x;
    if (i < s.positions) atomic_add(counts + s.digit_of(s.position(i)), 1);
  }
  __syncthreads();
  if (threadIdx.x < kDigits) s.counts[threadIdx.x * s.blocks + blockIdx.x] = counts[threadIdx.x];
}

// Lanes whose digit is this lane's, among those that have one.
ORTRAIN_DEVICE LaneMask lanes_with(int digit, bool has_one) {
  LaneMask same = lanes_where(has_one);
  for (int bit = 0; bit < kDigitBits; ++bit) {
    const LaneMask set = lanes_where((digit >> bit & 1) != 0);
    same &= (digit >> bit & 1) != 0 ? set : ~set;
  }
  return same;
}

// Every warp counts its digits one row of lanes after another, which gives each position its place
// among those of the warp with its digit; then come the warps and blocks in front, and lower
// digits.
__global__ void __launch_bounds__(kSortThreads) place_by_digit(SortPass s) {
  __shared__ int32_t counts[kSortWarps][kDigits];
  __shared__ int32_t warp_sums[kSortWarps];
  for (int i = threadIdx.x; i < kSortWarps * kDigits; i += kSortThreads) {
    counts[i / kDigits][i % kDigits] = 0;
  }
  __syncthreads();

  const int64_t first = blockIdx.x * kTile + int64_t{warp()} * (kWarpSize * kRounds) + lane();
  int32_t position[kRounds], place[kRounds];
  ORTRAIN_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    const int64_t i = first + round * kWarpSize;
    const bool is_there = i < s.positions;
    position[round] = is_there ? s.position(i) : 0;
    const int digit = is_there ? s.digit_of(position[round]) : 0;
    const LaneMask same = lanes_with(digit, is_there);
    const int rank = bits_in(same & lanes_below());
    place[round] = counts[warp()][digit] + rank;
    warp_barrier();
    if (is_there && rank == 0) counts[warp()][digit] += bits_in(same);
    warp_barrier();
  }
  __syncthreads();

  int32_t total = 0;
  const int digit = static_cast<int>(threadIdx.x);
  if (digit < kDigits) {
    for (int w = 0; w < kSortWarps; ++w) total += counts[w][digit];
  }
  int32_t start = sum_below(total);
  if (lane() == kWarpSize - 1) warp_sums[warp()] = start + total;
  __syncthreads();
  if (digit < kDigits) {
    if (s.starts != nullptr) {
      start = s.starts[digit * s.blocks + blockIdx.x];
    } else {
      for (int w = 0; w < warp(); ++w) start += warp_sums[w];
    }
    for (int w = 0; w < kSortWarps; ++w) {
      const int32_t own = counts[w][digit];
      counts[w][digit] = start;
      start += own;
    }
  }
  __syncthreads();
  ORTRAIN_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    if (first + round * kWarpSize >= s.positions) continue;
    s.to[counts[warp()][s.digit_of(position[round])] + place[round]] = position[round];
  }
}

}  // namespace

ByteCount PrefixSums::workspace_bytes() const { return bytes_of<int32_t>(scan_blocks_of(count_)); }

void PrefixSums::run(const int32_t* counts, int32_t* starts, void* workspace, void* stream) const {
  auto* const totals = static_cast<int32_t*>(workspace);
  const LaunchShape shape{.blocks = block_count(scan_blocks_of(count_)), .threads = kThreads};
  launch(scan_blocks, shape, stream, count_, counts, starts, totals);
  launch(scan_totals, shape, stream, count_, totals, starts);
}

IndexSort::IndexSort(int64_t positions, int64_t targets)
    : positions_(positions), targets_(targets), blocks_((positions + kTile - 1) / kTile) {
  // Positions without a target have the key `targets`.
  if (targets > 0) {
    passes_ = (std::bit_width(static_cast<uint64_t>(targets)) + kDigitBits - 1) / kDigitBits;
  }
  if (blocks_ > 1) sums_ = PrefixSums(kDigits * blocks_);
}

ByteCount IndexSort::workspace_bytes() const {
  ByteCount bytes = bytes_of<int32_t>(positions_);
  if (blocks_ > 1) {
    bytes +=
        bytes_of<int32_t>(2, kDigits, blocks_) + bytes_of<int32_t>(1) + sums_.workspace_bytes();
  }
  return bytes;
}

void IndexSort::run(const int32_t* targets, int32_t* sorted, void* workspace, void* stream) const {
  auto* const other = static_cast<int32_t*>(workspace);
  int32_t* const counts = other + positions_;
  int32_t* const starts = counts + kDigits * blocks_;
  const bool counts_apart = blocks_ > 1;
  const LaunchShape shape{.blocks = block_count(blocks_), .threads = kSortThreads};
  const int32_t* from = nullptr;
  for (int pass = 0; pass < passes_; ++pass) {
    // The last pass writes to `sorted`.
    int32_t* const to = (passes_ - pass) % 2 == 1 ? sorted : other;
    const SortPass s{.positions = positions_,
                     .blocks = blocks_,
                     .none = static_cast<int32_t>(targets_),
                     .shift = pass * kDigitBits,
                     .targets = targets,
                     .from = from,
                     .to = to,
                     .counts = counts,
                     .starts = counts_apart ? starts : nullptr};
    if (counts_apart) {
      launch(count_digits, shape, stream, s);
      sums_.run(counts, starts, starts + kDigits * blocks_ + 1, stream);
    }
    launch(place_by_digit, shape, stream, s);
    from = to;
  }
}

}  // namespace ortrain::gpu
