// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include "ortrain/runtime/execution_plan.h"

namespace ortrain::python {

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
  return result;
}

// The same, with every step and every buffer of the arena, for reports.
nanobind::dict describe_plan(const Graph& graph, const ExecutionPlan& plan);

}  // namespace ortrain::python
