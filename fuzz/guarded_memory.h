// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ortrain/runtime/kernel_registry.h"
#include "ortrain/runtime/session.h"

namespace ortrain::fuzz {

// The CPU's kernels on memory that AddressSanitizer knows to the byte: tensors are allocations of
// their own, and of the arena a step of a guarded plan sees its inputs, results and workspace.
KernelRegistry& guarded_kernels();

// What arenas are filled with from now on: results must not depend on it.
void set_arena_fill(uint8_t fill);

// Memory that is 64-byte aligned and ends where it ends.
std::shared_ptr<Block> exact_block(size_t bytes);

// As make_execution_plan, for Session::Options::make_plan. Throws BrokenRule where a step reads
// bytes that are not those of its operand, or reaches out of what it is given.
std::shared_ptr<const ExecutionPlan> make_guarded_plan(const Graph& graph,
                                                       const std::vector<Dims>& input_dims,
                                                       const KernelRegistry& kernels,
                                                       const PlanOptions& options);

}  // namespace ortrain::fuzz
