// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "fuzz/exercise_graph.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "fuzz/answers.h"
#include "fuzz/byte_source.h"
#include "fuzz/guarded_memory.h"
#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/half.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/pipeline.h"

namespace ortrain::fuzz {
namespace {

// What runs takes less, so that a run takes milliseconds under the sanitizers.
// Kernels may keep tables of a few times the bytes that a node reads and writes.
constexpr uint64_t kMostPlannedBytes = uint64_t{16} << 20;
constexpr size_t kMostRunBytes = size_t{1} << 20;
constexpr double kMostRunWork = 1e6;  // bytes and operations of all steps

std::vector<Dims> draw_extents(const Graph& graph, Numbers& numbers) {
  std::map<std::string, int64_t> bindings;
  const auto draw = [&](const std::string& symbol) {
    const size_t kind = numbers.below(16);
    const int64_t small = static_cast<int64_t>(1 + numbers.below(4));
    const int64_t drawn = kind == 0 ? 0 : kind == 1 ? std::abs(numbers.extreme() / 2) : small;
    return bindings.emplace(symbol, drawn).first->second;
  };
  std::vector<Dims> result;
  for (const GraphInput& input : graph.inputs()) {
    Dims dims;
    for (const Dim& extent : graph.value(input.value).shape) {
      for (const std::string& symbol : extent.symbols()) draw(symbol);
      const std::optional<int64_t> value = extent.evaluate(bindings);
      dims.push_back(value ? *value : draw(extent.str()));
    }
    result.push_back(std::move(dims));
  }
  return result;
}

double draw_float(Numbers& numbers) {
  constexpr double kSpecial[] = {0.0,
                                 -0.0,
                                 1e30,
                                 -1e30,
                                 1e-40,
                                 std::numeric_limits<double>::infinity(),
                                 -std::numeric_limits<double>::infinity(),
                                 std::numeric_limits<double>::quiet_NaN()};
  const uint64_t drawn = numbers.next();
  if (drawn % 24 == 0) return kSpecial[(drawn >> 8) % std::size(kSpecial)];
  return static_cast<double>(drawn >> 40) / (1 << 22) - 2;
}

int64_t draw_integer(Numbers& numbers) {
  const uint64_t drawn = numbers.next();
  if (drawn % 64 == 0) return numbers.extreme();
  return static_cast<int64_t>((drawn >> 8) % 4) - (drawn % 8 == 1 ? 2 : 0);
}

std::shared_ptr<Block> draw_contents(const TensorSpec& spec, Numbers& numbers) {
  std::shared_ptr<Block> block = exact_block(spec.bytes());
  const size_t size = size_of(spec.dtype);
  auto* const begin = static_cast<char*>(block->data());
  const auto put = [&](char* at, const auto& value) { std::memcpy(at, &value, sizeof(value)); };
  for (char* at = begin; at < begin + spec.bytes(); at += size) {
    switch (spec.dtype) {
      case DType::f64:
        put(at, draw_float(numbers));
        break;
      case DType::f32:
        put(at, static_cast<float>(draw_float(numbers)));
        break;
      case DType::f16:
        put(at, Float16(static_cast<float>(draw_float(numbers))));
        break;
      case DType::bf16:
        put(at, BFloat16(static_cast<float>(draw_float(numbers))));
        break;
      case DType::boolean:
        put(at, static_cast<uint8_t>(numbers.next() & 1));
        break;
      default: {
        const int64_t value = draw_integer(numbers);
        std::memcpy(at, &value, size);
      }
    }
  }
  return block;
}

// The inputs of a graph, in memory that ends where they end.
class Contents {
 public:
  Contents(const Graph& graph, const ExecutionPlan& plan, uint64_t seed) {
    Numbers numbers(seed);
    for (size_t i = 0; i < plan.inputs.size(); ++i) {
      blocks_.push_back(draw_contents(plan.inputs[i], numbers));
      const bool is_gradient = graph.inputs()[i].role == InputRole::gradient;
      forward.push_back(is_gradient ? nullptr : blocks_.back()->data());
      backward.push_back(is_gradient ? blocks_.back()->data() : nullptr);
    }
  }
  std::vector<const void*> forward, backward;

 private:
  std::vector<std::shared_ptr<Block>> blocks_;
};

bool is_small(const ExecutionPlan& plan) {
  size_t bytes = plan.total_bytes();  // of at most 2^47 each, so that sums are no problem
  for (const TensorSpec& input : plan.inputs) bytes += input.bytes();
  double work = 0;
  for (const PlanStep& step : plan.steps) work += step.bytes + step.flops;
  return bytes < kMostRunBytes && work < kMostRunWork;
}

using Results = std::vector<std::string>;

void keep(const std::vector<RunOutput>& outputs, Results& results) {
  for (const RunOutput& output : outputs) {
    if (output.block == nullptr) continue;
    results.emplace_back(static_cast<const char*>(output.block->data()), output.spec.bytes());
  }
}

// Nullopt where a kernel refuses the contents.
std::optional<Results> run(const std::shared_ptr<Session>& session,
                           const std::shared_ptr<const ExecutionPlan>& plan,
                           const Contents& contents, uint8_t fill) {
  set_arena_fill(fill);
  Results results;
  RunContext context(session, plan);
  const bool done = accepted([&] {
    keep(context.forward(contents.forward), results);
    if (context.can_run_backward()) keep(context.backward(contents.backward), results);
  });
  return done ? std::optional(std::move(results)) : std::nullopt;
}

void simplify_and_check(Graph& graph, const char* stage) {
  run_pipeline(graph, stage);
  graph.remove_dead_nodes();
  try {
    verify(graph);
  } catch (const Error& error) {
    throw BrokenRule(str("after '", stage, "': ", error.what()));
  }
}

}  // namespace

void differentiate(Graph& graph) {
  BackwardOptions options;
  const std::vector<bool> wanted = differentiable_outputs(graph);
  for (size_t k = 0, user = 0; k < graph.outputs().size(); ++k) {
    if (graph.outputs()[k].role != OutputRole::user) continue;
    if (wanted[user++]) options.output_indices.push_back(k);
  }
  if (options.output_indices.empty()) throw UnsupportedError("there is nothing to train");
  build_backward(graph, options);
  graph.remove_dead_nodes();
  graph.sort();
}

void plan_and_run(Graph graph, uint64_t seed, const Session::PlanFunction& plans, bool repeats) {
  Numbers numbers(seed);
  std::shared_ptr<Session> session;
  std::shared_ptr<const ExecutionPlan> plan;
  const bool planned = accepted([&] {
    std::vector<Dims> dims = draw_extents(graph, numbers);
    session = std::make_shared<Session>(
        std::move(graph), guarded_kernels(),
        Session::Options{.plan = {.memory_limit = kMostPlannedBytes}, .make_plan = plans});
    plan = session->plan(dims);
  });
  if (!planned || !is_small(*plan)) return;
  const Contents contents(session->graph(), *plan, numbers.next());
  const std::optional<Results> first = run(session, plan, contents, 0x00);
  if (!repeats || seed % 4 != 0) return;
  require(first == run(session, plan, contents, 0xa5),
          "results depend on what was in the arena before");
}

void exercise_graph(const Graph& graph, uint64_t seed) {
  try {
    verify(graph);
  } catch (const Error& error) {
    throw BrokenRule(str("a graph that was read is not valid: ", error.what()));
  }
  Graph forward = graph;
  if (!accepted([&] { simplify_and_check(forward, "simplify"); })) return;
  Graph training = forward;
  const bool differentiated = accepted([&] {
    differentiate(training);
    simplify_and_check(training, "fuse");
  });
  // Without a backward the fused forward, as an evaluation runs it.
  if (!differentiated) {
    training = forward;
    if (!accepted([&] { simplify_and_check(training, "fuse"); })) return;
  }
  plan_and_run(std::move(training), seed, make_guarded_plan, true);
  if (seed % 8 == 1) plan_and_run(std::move(forward), seed, make_guarded_plan, true);
}

}  // namespace ortrain::fuzz
