// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "ortrain/runtime/arena_buffers.h"
#include "python/src/plan_sizes.h"

namespace nb = nanobind;

namespace ortrain::python {

nb::dict describe_plan(const Graph& session_graph, const ExecutionPlan& plan) {
  const Graph& graph = plan.graph_of(session_graph);
  nb::list steps;
  for (const PlanStep& step : plan.steps) {
    nb::dict row;
    row["node"] = step.node;
    row["op"] = step.node == kNoNode ? std::string("copy") : graph.node(step.node).op;
    row["name"] = step.node == kNoNode ? std::string() : graph.node(step.node).name;
    row["kernel"] = step.kernel;
    row["bytes"] = step.bytes;
    row["flops"] = step.flops;
    nb::list shapes;
    for (const TensorSpec& output : step.outputs) {
      shapes.append(output.dtype == DType::undefined ? std::string() : tensor_spec_str(output));
    }
    row["shapes"] = shapes;
    steps.append(row);
  }
  nb::list buffers;
  for (const ArenaBuffer& buffer : arena_buffers(graph, plan)) {
    nb::dict row;
    row["value"] = buffer.value == kNoValue ? std::string() : graph.value(buffer.value).name;
    row["first_step"] = buffer.step;
    row["last_step"] = buffer.last_step;
    row["offset"] = buffer.offset;
    row["bytes"] = buffer.bytes;
    row["num_values"] = buffer.num_values;
    buffers.append(row);
  }
  nb::dict result = plan_sizes(plan);
  result["steps"] = steps;
  result["num_forward_steps"] = plan.num_forward_steps;
  result["buffers"] = buffers;
  return result;
}

}  // namespace ortrain::python
