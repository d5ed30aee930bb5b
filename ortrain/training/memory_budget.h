// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

#include "ortrain/ir/graph.h"
#include "ortrain/runtime/session.h"

namespace ortrain {

// What ExecutionPlan::total_bytes() of a step may be: one of the two, or neither.
struct MemoryBudget {
  uint64_t bytes = 0;  // 0: none
  // Of what the plan takes that computes nothing again, or the largest such plan so far: where that
  // fits, a smaller batch does, though its gradients alone may be more than the share. 0: none.
  double share = 0;

  bool is_set() const { return bytes > 0 || share > 0; }
};

// For Session::Options::make_plan: plans that stay within a budget. Where the plan of the session's
// graph exceeds it, values that are kept for the backward are computed again in the backward, at
// the least time by an estimate from bytes and FLOPs, until the plan fits. That is decided for the
// shapes of each plan, so that the budget holds at any batch size, and a small batch pays nothing.
//
// `unfused`: the graph with its backward before stage "fuse"; the session has its fused form.
// `finish`: what else was done to the session's graph behind that stage. Without nodes of phase
// backward a budget in bytes can only be met or refused, and a share means nothing.
//
// The function throws OutOfMemoryError naming the budget, the least that can be reached and what
// bounds it. It is to be called by one thread at a time, as a session does.
Session::PlanFunction plan_within(Graph unfused, MemoryBudget budget,
                                  std::function<void(Graph&)> finish = {});

}  // namespace ortrain
