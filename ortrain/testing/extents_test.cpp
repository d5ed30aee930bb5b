// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// A case of each form of each operator, each of its extents set to 0, or to 2^40 beside a 0: an
// error, or a result at once.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <set>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/error.h"
#include "ortrain/runtime/session.h"
#include "ortrain/testing/harness.h"

namespace ortrain::testing {
namespace {

constexpr int64_t kFar = int64_t{1} << 40;
constexpr uint64_t kMemory = uint64_t{1} << 22;
// A loop over 2^40 takes many minutes; what is right takes milliseconds.
constexpr unsigned kSecondsOfALoop = 60;

using Extents = std::vector<Dims>;  // of a case's inputs

std::string text_of(const Extents& extents) {
  std::string text;
  for (const Dims& dims : extents) text += dims_str(dims) + " ";
  return text;
}

Extents extents_of(const OpCase& op_case) {
  Extents extents;
  for (const CaseInput& input : op_case.inputs) extents.push_back(input.dims);
  return extents;
}

// Calls `visit` with the case's extents, changed: all axes as long as one, or one axis alone, to 0;
// and to 2^40 with others 0.
void for_each_change(const OpCase& op_case, const std::function<void(const Extents&)>& visit) {
  using Axis = std::pair<size_t, size_t>;
  const Extents original = extents_of(op_case);
  std::map<int64_t, std::vector<Axis>> by_length;
  std::vector<std::vector<Axis>> groups;
  for (size_t i = 0; i < original.size(); ++i) {
    const bool says_what_to_do = op_case.inputs[i].fill == CaseInput::Fill::values;
    for (size_t axis = 0; axis < original[i].size(); ++axis) {
      if (!says_what_to_do) by_length[original[i][axis]].push_back({i, axis});
      groups.push_back({{i, axis}});
    }
  }
  for (const auto& [length, axes] : by_length) {
    if (axes.size() > 1) groups.push_back(axes);
  }
  std::set<Extents> seen{original};
  const auto change = [&](Extents extents, const std::vector<Axis>& axes, int64_t length) {
    for (const auto& [input, axis] : axes) extents[input][axis] = length;
    return extents;
  };
  for (const std::vector<Axis>& zero : groups) {
    const Extents without = change(original, zero, 0);
    if (seen.insert(without).second) visit(without);
    for (const std::vector<Axis>& far : groups) {
      const Extents with = change(change(original, far, kFar), zero, 0);
      if (seen.insert(with).second) visit(with);
    }
  }
}

// The case with these extents. What it says of contents is repeated or cut.
OpCase changed(const OpCase& op_case, const Extents& extents, DType type) {
  OpCase result = op_case;
  result.types = {type};
  for (size_t i = 0; i < extents.size(); ++i) {
    CaseInput& input = result.inputs[i];
    input.dims = extents[i];
    if (input.fill != CaseInput::Fill::values) continue;
    int64_t count = 1;
    for (int64_t extent : extents[i]) count *= std::min<int64_t>(extent, 1 << 12);
    if (count > (1 << 12) || input.values.empty()) {
      input.fill = CaseInput::Fill::uniform;
      continue;
    }
    const std::vector<double> values = input.values;
    input.values.resize(static_cast<size_t>(count));
    for (size_t k = 0; k < input.values.size(); ++k) input.values[k] = values[k % values.size()];
  }
  return result;
}

bool is_small(const OpCase& op_case) {
  double most = 0;
  for (const CaseInput& input : op_case.inputs) {
    double count = 8;
    for (int64_t extent : input.dims) count *= static_cast<double>(extent);
    most = std::max(most, count);
  }
  return most <= static_cast<double>(kMemory);
}

// Whether an input is a constant of the graph: integers that are known.
bool is_constant(const TensorData& input, bool knows_integers) {
  return knows_integers && !kFloatTypes.contains(input.dtype());
}

void plan_and_run(Graph graph, const std::vector<TensorData>& inputs, bool knows_integers) {
  std::vector<Dims> dims;
  std::vector<const void*> forward, backward;
  for (const TensorData& input : inputs) {
    if (!input.defined() || is_constant(input, knows_integers)) continue;
    dims.push_back(input.dims());
    forward.push_back(input.data());
  }
  dims.resize(graph.inputs().size());
  auto session = std::make_shared<Session>(std::move(graph), cpu_kernels(),
                                           Session::Options{.plan = {.memory_limit = kMemory}});
  const auto plan = session->plan(dims);
  std::vector<TensorData> gradients;
  for (size_t i = 0; i < plan->inputs.size(); ++i) {
    const bool is_gradient = session->graph().inputs()[i].role == InputRole::gradient;
    if (is_gradient) {
      void* data = nullptr;
      gradients.push_back(TensorData::allocate(plan->inputs[i].dtype, plan->inputs[i].dims, &data));
      std::memset(data, 0, gradients.back().bytes());
    }
    if (i >= forward.size()) forward.push_back(nullptr);
    backward.push_back(is_gradient ? gradients.back().data() : nullptr);
  }
  RunContext context(session, plan);
  context.forward(forward);
  if (context.can_run_backward()) context.backward(backward);
}

// Calls what may refuse.
bool accepted(const std::function<void()>& call) {
  try {
    call();
  } catch (const InternalError&) {
    throw;
  } catch (const Error&) {
    return false;
  }
  return true;
}

void run_everywhere(const OpCase& op_case, DType type) {
  std::vector<TensorData> inputs;
  if (!accepted([&] { inputs = make_inputs(op_case, type); })) return;  // too large, though empty
  for (const bool knows_integers : {true, false}) {
    Graph graph;
    const auto constant = [&](const TensorData& x) { return is_constant(x, knows_integers); };
    if (!accepted([&] { graph = graph_of_case(op_case, inputs, constant); })) continue;
    Graph training = graph;
    accepted([&] { plan_and_run(std::move(graph), inputs, knows_integers); });
    const bool differentiated = accepted([&] {
      build_backward(training, {.output_indices = op_case.gradient_outputs});
      training.remove_dead_nodes();
      training.sort();
    });
    if (!differentiated) continue;
    accepted([&] { plan_and_run(std::move(training), inputs, knows_integers); });
  }
}

char loop_message[512];

void tell_of_loop(int) {
  if (write(STDERR_FILENO, loop_message, std::strlen(loop_message)) < 0) _exit(2);
  _exit(1);
}

class OpExtents : public ::testing::TestWithParam<OpCase> {};

TEST_P(OpExtents, OfZeroAreTakenOrRefused) {
  const OpCase& op_case = GetParam();
  const DType type = types_under_test(op_case).front();
  std::signal(SIGALRM, tell_of_loop);
  for_each_change(op_case, [&](const Extents& extents) {
    const OpCase other = changed(op_case, extents, type);
    if (!is_small(other)) return;
    SCOPED_TRACE(text_of(extents));
    std::snprintf(loop_message, sizeof(loop_message), "%s loops: %s\n", case_name(op_case).c_str(),
                  text_of(extents).c_str());
    alarm(kSecondsOfALoop);
    try {
      run_everywhere(other, type);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    alarm(0);
  });
  std::signal(SIGALRM, SIG_DFL);
}

std::string name_of_test(const ::testing::TestParamInfo<OpCase>& info) {
  return test_name(info.param, info.index);
}

// One case of those that differ in extents and contents alone: these are changed here.
std::vector<OpCase> cases_of_each_form() {
  std::vector<OpCase> cases;
  std::set<std::string> seen;
  for (const OpCase& op_case : all_cases().all()) {
    if (op_case.refusal) continue;
    std::string form = str(op_case.op, " ", op_case.outputs);
    for (const CaseInput& input : op_case.inputs) {
      form += str(" ", input.dims.size(), name_of(input.dtype), static_cast<int>(input.fill));
    }
    for (const auto& [name, value] : op_case.attributes) form += str(" ", name);
    if (seen.insert(form).second) cases.push_back(op_case);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, OpExtents, ::testing::ValuesIn(cases_of_each_form()), name_of_test);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OpExtents);

}  // namespace
}  // namespace ortrain::testing
