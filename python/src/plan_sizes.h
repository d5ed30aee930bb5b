// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include "ortrain/runtime/execution_plan.h"

namespace ortrain::python {

inline nanobind::dict describe(const RecomputationSummary& summary) {
  nanobind::dict nodes;
  for (const auto& [op, count] : summary.nodes) nodes[op.c_str()] = count;
  nanobind::dict result;
  result["budget_bytes"] = summary.budget_bytes;
  result["total_bytes_without"] = summary.total_bytes_without;
  result["arena_bytes_without"] = summary.arena_bytes_without;
  result["nodes"] = nodes;
  result["bytes"] = static_cast<uint64_t>(summary.bytes);
  result["time_share"] = summary.time_share;
  return result;
}

// The bytes that a plan needs, by kind, and the number of its steps.
inline nanobind::dict plan_sizes(const ExecutionPlan& plan) {
  nanobind::dict result;
  result["arena_bytes"] = plan.arena_bytes;
  result["arena_lower_bound"] = plan.arena_lower_bound;
  result["constant_bytes"] = plan.constant_bytes;
  result["forward_output_bytes"] = plan.forward_output_bytes;
  result["gradient_bytes"] = plan.gradient_bytes;
  result["total_bytes"] = plan.total_bytes();
  result["steps"] = plan.steps.size();
  result["recomputation"] = plan.recomputation ? nanobind::object(describe(*plan.recomputation))
                                               : nanobind::object(nanobind::none());
  return result;
}

// The same, with every step and every buffer of the arena, for reports. `graph`: the session's.
nanobind::dict describe_plan(const Graph& graph, const ExecutionPlan& plan);

}  // namespace ortrain::python
