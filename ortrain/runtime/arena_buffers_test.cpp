// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/arena_buffers.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "ortrain/ir/text.h"
#include "ortrain/plan/memory_planner.h"

namespace ortrain {
namespace {

struct Planned {
  Graph graph;
  std::shared_ptr<const ExecutionPlan> plan;
  std::vector<ArenaBuffer> buffers;

  Planned(const std::string& text, const std::vector<Dims>& dims)
      : graph(parse_graph(text)),
        plan(make_execution_plan(graph, dims, cpu_kernels())),
        buffers(arena_buffers(graph, *plan)) {}

  const ArenaBuffer* of(const std::string& value) const {
    const ValueId id = graph.find_value(value);
    const auto found =
        std::ranges::find_if(buffers, [&](const ArenaBuffer& b) { return b.value == id; });
    return found == buffers.end() ? nullptr : &*found;
  }
};

// Inside of the arena, and none on top of another that is alive at the same step.
void expect_sound(const Planned& planned) {
  std::vector<size_t> alive(planned.plan->steps.size(), 0);
  for (size_t i = 0; i < planned.buffers.size(); ++i) {
    const ArenaBuffer& a = planned.buffers[i];
    EXPECT_LE(a.offset + a.bytes, planned.plan->arena_bytes);
    EXPECT_LE(a.step, a.last_step);
    for (int step = a.step; step <= a.last_step; ++step) {
      alive[static_cast<size_t>(step)] +=
          (a.bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
    }
    for (size_t k = 0; k < i; ++k) {
      const ArenaBuffer& b = planned.buffers[k];
      const bool in_time = a.step <= b.last_step && b.step <= a.last_step;
      const bool in_space = a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
      EXPECT_FALSE(in_time && in_space) << i << " and " << k;
    }
  }
  EXPECT_EQ(*std::ranges::max_element(alive), planned.plan->arena_lower_bound);
}

TEST(ArenaBuffers, LiveFromTheirMakerToTheirLastReader) {
  const Planned planned(
      "graph g (float32[16, 16] x, float32[16, 16] w) => (y) {\n"
      "  a = MatMul(x, w)\n  b = MatMul(a, w)\n  c = MatMul(b, w)\n  y = MatMul(a, c)\n}",
      {{16, 16}, {16, 16}});
  ASSERT_EQ(planned.plan->steps.size(), 4u);
  expect_sound(planned);
  const ArenaBuffer* a = planned.of("a");
  const ArenaBuffer* b = planned.of("b");
  ASSERT_NE(a, nullptr);
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(std::pair(a->step, a->last_step), std::pair(0, 3));
  EXPECT_EQ(std::pair(b->step, b->last_step), std::pair(1, 2));
  EXPECT_EQ(a->bytes, 16u * 16 * 4);
  // The result has a block of its own.
  EXPECT_EQ(planned.of("y"), nullptr);
}

TEST(ArenaBuffers, AreOneWhereAResultTakesTheMemoryOfAnInput) {
  const Planned planned(
      "graph g (float32[64] x) => (y) {\n"
      "  a = Tanh(x)\n  b = Exp(a)\n  c = Neg(b)\n  y = ReduceSum(c)\n}",
      {{64}});
  expect_sound(planned);
  const ArenaBuffer* a = planned.of("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->num_values, 3);
  EXPECT_EQ(a->last_step, 3);
  EXPECT_EQ(planned.of("b"), nullptr);
}

TEST(ArenaBuffers, ViewsKeepWhatTheyShow) {
  const Planned planned(
      "graph g (float32[8, 16] x, float32[16, 16] w) => (y) {\n"
      "  a = MatMul(x, w)\n  shape = Constant <value_ints = [16, 8]> ()\n"
      "  v = Reshape(a, shape)\n  b = MatMul(x, w)\n  z = MatMul(b, v)\n  y = Tanh(z)\n}",
      {{8, 16}, {16, 16}});
  expect_sound(planned);
  const ArenaBuffer* a = planned.of("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->last_step, 2);
  EXPECT_EQ(planned.of("v"), nullptr);
}

TEST(ArenaBuffers, EmptyValuesHaveNone) {
  const Planned planned(
      "graph g (float32[n, 16] x, float32[16, 16] w) => (y) {\n"
      "  a = MatMul(x, w)\n  y = MatMul(a, w)\n}",
      {{0, 16}, {16, 16}});
  EXPECT_TRUE(planned.buffers.empty());
}

}  // namespace
}  // namespace ortrain
