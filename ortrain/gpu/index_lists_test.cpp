// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/index_lists.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "ortrain/gpu/index_sort.h"
#include "ortrain/gpu/launch.h"

namespace ortrain::gpu {
namespace {

// A device's, which is the host's under the simulator; poisoned, so that nothing is taken for 0.
class Workspace {
 public:
  // A word at each end is nobody's; what lies between begins at a multiple of 16 bytes, as arenas
  // do.
  explicit Workspace(ByteCount bytes) : words_(bytes.value() / 8 + 4, 0x7f7f7f7f7f7f7f7f) {}
  void* data() { return words_.data() + 2; }
  ~Workspace() {
    EXPECT_EQ(words_[1], 0x7f7f7f7f7f7f7f7f);
    EXPECT_EQ(words_.back(), 0x7f7f7f7f7f7f7f7f);
  }

 private:
  std::vector<int64_t> words_;
};

struct Drawn {
  int64_t positions, targets;
  double alike;  // share of positions that point to one target
  double none;   // share that point to none

  std::vector<int32_t> draw(unsigned seed) const {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<double> share;
    std::uniform_int_distribution<int32_t> any(0, static_cast<int32_t>(targets - 1));
    const int32_t favourite = any(generator);
    std::vector<int32_t> drawn(static_cast<size_t>(positions));
    for (int32_t& target : drawn) {
      const double at = share(generator);
      target = at < none ? -1 : at < none + alike ? favourite : any(generator);
    }
    return drawn;
  }
};

// Around the sizes of tiles (8192 positions), parts (128) and digits (8 bits).
const std::vector<Drawn>& samples() {
  static const std::vector<Drawn> all{
      {1, 1, 0, 0},        {1, 1, 0, 1},          {127, 3, 0, 0},        {128, 1, 0, 0},
      {129, 1, 0, 0},      {300, 2, 0.9, 0.1},    {1000, 255, 0.5, 0.2}, {1000, 256, 0, 0.2},
      {8191, 257, 0.2, 0}, {8192, 65535, 0.3, 0}, {8193, 65536, 0.3, 0}, {8193, 70000, 0, 0.01},
      {20000, 12, 0, 0},   {20000, 300, 0.6, 0},  {30000, 1, 0, 0.5},    {17000, 20000, 0.05, 0.9},
  };
  return all;
}

TEST(IndexSort, IsStable) {
  unsigned seed = 0;
  for (const Drawn& sample : samples()) {
    const std::vector<int32_t> targets = sample.draw(++seed);
    std::vector<int32_t> wanted(targets.size()), sorted(targets.size(), -7);
    std::iota(wanted.begin(), wanted.end(), 0);
    const auto key = [&](int32_t position) {
      const int32_t target = targets[static_cast<size_t>(position)];
      return target < 0 ? sample.targets : target;
    };
    std::stable_sort(wanted.begin(), wanted.end(),
                     [&](int32_t a, int32_t b) { return key(a) < key(b); });
    const IndexSort sort(sample.positions, sample.targets);
    Workspace workspace(sort.workspace_bytes());
    sort.run(targets.data(), sorted.data(), workspace.data(), nullptr);
    EXPECT_EQ(sorted, wanted) << sample.positions << " of " << sample.targets;
  }
}

TEST(PrefixSums, OfManyBlocks) {
  for (const int64_t count : {1, 2047, 2048, 2049, 10000}) {
    std::vector<int32_t> counts(static_cast<size_t>(count)), starts(counts.size() + 1, -7);
    std::iota(counts.begin(), counts.end(), 3);
    std::vector<int32_t> wanted{0};
    for (const int32_t one : counts) wanted.push_back(wanted.back() + one);
    const PrefixSums sums(count);
    Workspace workspace(sums.workspace_bytes());
    sums.run(counts.data(), starts.data(), workspace.data(), nullptr);
    EXPECT_EQ(starts, wanted) << count;
  }
}

__global__ void put_targets(int64_t positions, const int32_t* targets, TargetSink sink) {
  for_each_item(positions, [&](int64_t i) { sink.put(i, targets[i]); });
}

template <class T>
void check_sums(const Drawn& sample, int64_t outer, int64_t inner, bool has_base, unsigned seed) {
  const std::vector<int32_t> targets = sample.draw(seed);
  const ListShape shape{outer, sample.positions, sample.targets, inner};
  std::vector<T> updates(static_cast<size_t>(outer * sample.positions * inner));
  std::vector<T> out(static_cast<size_t>(outer * sample.targets * inner), T{5});
  // Small whole numbers: any order of additions gives the same.
  for (size_t i = 0; i < updates.size(); ++i) updates[i] = static_cast<T>(i * 7 % 11);
  std::vector<T> wanted(out.size(), has_base ? T{5} : T{0});
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t i = 0; i < sample.positions; ++i) {
      const int32_t target = targets[static_cast<size_t>(i)];
      if (target < 0) continue;
      for (int64_t k = 0; k < inner; ++k) {
        wanted[static_cast<size_t>((o * sample.targets + target) * inner + k)] +=
            updates[static_cast<size_t>((o * sample.positions + i) * inner + k)];
      }
    }
  }
  constexpr DType kType = std::is_same_v<T, float> ? DType::f32 : DType::i64;
  const JoinByIndex join(kType, shape);
  Workspace workspace(join.workspace_bytes());
  const TargetSink sink = join.begin(workspace.data(), nullptr);
  launch(put_targets, items(sample.positions), nullptr, sample.positions, targets.data(), sink);
  join.finish(Reduction::add, has_base ? out.data() : nullptr, updates.data(), out.data(),
              workspace.data(), nullptr);
  EXPECT_EQ(out, wanted) << sample.positions << " of " << sample.targets << ", inner " << inner;
}

TEST(JoinByIndex, AddsUpLongAndShortLists) {
  unsigned seed = 100;
  for (const Drawn& sample : samples()) {
    if (sample.positions > 10000 && sample.targets > 100) continue;
    ++seed;
    check_sums<float>(sample, 1, 3, false, seed);
    check_sums<float>(sample, 1, 1, true, seed);
    check_sums<int64_t>(sample, 2, 2, true, seed);
  }
  check_sums<float>({700, 5, 0.5, 0.1}, 3, 8, true, 1);
  check_sums<float>({500, 2, 0.5, 0}, 2, 1032, false, 2);
}

}  // namespace
}  // namespace ortrain::gpu
