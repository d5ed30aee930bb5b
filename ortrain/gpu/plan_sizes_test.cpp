// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/error.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/runtime_compiler.h"
#include "ortrain/gpu/simulated_device.h"
#include "ortrain/ir/text.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/training/memory_budget.h"

// Plans that are made for their sizes put nothing on the device and compile nothing.
namespace ortrain {
namespace {

Graph layers(int count) {
  std::string text =
      "graph g (float32[n, 64] x [user grad], float32[64, 64] w [user grad], float32[64] s) => (y) "
      "{\n  h0 = Mul(x, s)\n";
  for (int layer = 1; layer <= count; ++layer) {
    const std::string l = std::to_string(layer);
    text += "  const c" + l + " = float32[64, 1] {";
    for (int i = 0; i < 64; ++i) text += (i > 0 ? ", 0." : "0.") + std::to_string(layer + i);
    text += "}\n  v" + l + " = Mul(w, c" + l + ")\n";
    text += "  a" + l + " = MatMul(h" + std::to_string(layer - 1) + ", v" + l + ")\n";
    text += "  b" + l + " = Tanh(a" + l + ")\n  d" + l + " = Mul(b" + l + ", a" + l + ")\n";
    text += "  h" + l + " = Softmax <axis = 1> (d" + l + ")\n";
  }
  text += "  y = ReduceSum<keepdims = 1>(h" + std::to_string(count) + ")\n}\n";
  Graph graph = parse_graph(text);
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  return graph;
}

std::vector<Dims> dims_of(const Graph& graph) {
  std::vector<Dims> dims;
  for (const GraphInput& input : graph.inputs()) {
    Dims& made = dims.emplace_back();
    for (const Dim& extent : graph.value(input.value).shape) {
      made.push_back(extent.is_constant() ? extent.constant() : 100);
    }
  }
  return dims;
}

struct Work {
  int64_t uploads = gpu::simulator::num_uploads();
  size_t jobs = gpu::num_kernel_jobs();
  Work since(const Work& before) const {
    Work result;
    result.uploads = uploads - before.uploads;
    result.jobs = jobs - before.jobs;
    return result;
  }
};

class PlanSizes : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam()) setenv("ORTRAIN_GPU_COMPILER", "/bin/false", 1);
    setenv("ORTRAIN_KERNEL_CACHE_DIR", "off", 1);
  }
  void TearDown() override {
    unsetenv("ORTRAIN_GPU_COMPILER");
    unsetenv("ORTRAIN_KERNEL_CACHE_DIR");
  }
};

TEST_P(PlanSizes, AreThoseOfPlansThatRun) {
  Graph graph = layers(5);
  run_pipeline(graph, "fuse");
  const std::vector<Dims> dims = dims_of(graph);
  const Work before;
  const auto sizes = make_execution_plan(graph, dims, gpu::kernels(0), {.sizes_only = true});
  const Work between;
  EXPECT_EQ(between.since(before).uploads, 0);
  EXPECT_EQ(between.since(before).jobs, 0U);
  const auto plan = make_execution_plan(graph, dims, gpu::kernels(0));
  const Work made = Work().since(between);
  EXPECT_GT(made.uploads, 0);
  EXPECT_EQ(made.jobs > 0, GetParam());
  EXPECT_GT(plan->constant_bytes, 0U);
  EXPECT_EQ(sizes->total_bytes(), plan->total_bytes());
  EXPECT_EQ(sizes->arena_bytes, plan->arena_bytes);
  EXPECT_EQ(sizes->steps.size(), plan->steps.size());
  auto session = std::make_shared<Session>(graph, gpu::kernels(0));
  EXPECT_THROW(RunContext(session, sizes), InternalError);
}

TEST_P(PlanSizes, ASearchForABudgetTouchesTheDeviceForItsPlanAlone) {
  const Graph unfused = layers(7);
  Graph fused = unfused;
  run_pipeline(fused, "fuse");
  const std::vector<Dims> dims = dims_of(fused);
  const auto session_within = [&](MemoryBudget budget) {
    Session::Options options;
    options.make_plan = plan_within(unfused, budget);
    return std::make_shared<Session>(fused, gpu::kernels(0), std::move(options));
  };
  const Work before;
  const auto plan = session_within({.share = 0.7})->plan(dims);
  const Work made = Work().since(before);
  ASSERT_TRUE(plan->rewritten);
  EXPECT_FALSE(plan->sizes_only);
  EXPECT_LE(plan->total_bytes(), plan->recomputation->budget_bytes);
  const Work again;
  make_execution_plan(*plan->rewritten, dims, gpu::kernels(0));
  EXPECT_EQ(made.uploads, Work().since(again).uploads);
  const auto generated =
      std::ranges::count(plan->steps, std::string("generated"), &PlanStep::kernel);
  EXPECT_LE(made.jobs, static_cast<size_t>(generated));
  EXPECT_EQ(generated > 0, GetParam());
  // Plans that fit as they are.
  const Work fits;
  EXPECT_FALSE(session_within({.share = 1})->plan(dims)->sizes_only);
  const Work once = Work().since(fits);
  make_execution_plan(fused, dims, gpu::kernels(0));
  EXPECT_EQ(once.uploads * 2, Work().since(fits).uploads);
  // What cannot be reached.
  const Work unreachable;
  EXPECT_THROW(session_within({.bytes = 1000})->plan(dims), OutOfMemoryError);
  EXPECT_EQ(Work().since(unreachable).uploads, 0);
  EXPECT_EQ(Work().since(unreachable).jobs, 0U);
}

INSTANTIATE_TEST_SUITE_P(All, PlanSizes, ::testing::Bool(), [](const auto& info) {
  return info.param ? "CompiledKernels" : "InterpretedKernels";
});

}  // namespace
}  // namespace ortrain
