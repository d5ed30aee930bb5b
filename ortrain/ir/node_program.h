// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "ortrain/ir/expr_program.h"
#include "ortrain/ir/node_spec.h"

namespace ortrain {

// Builds the expression program of a node: its inputs are the node's present inputs in order, its
// outputs the node's wanted outputs in order.
using ProgramOfNode = std::function<ExprProgram(const NodeSpec&)>;

// The program of an elementwise node from OpDef::expression.
ExprProgram elementwise_program(const NodeSpec& spec);

// The operands of a program among those of its node: absent ones are skipped.
struct ProgramOperands {
  explicit ProgramOperands(const NodeSpec& spec);

  std::vector<size_t> inputs;
  std::vector<size_t> outputs;
  std::vector<Dims> input_dims;  // per entry of `inputs`
};

// (input, output) of the node with equal types and shapes. Equal bytes alone do not do for
// programs: a broadcast input may have as many as a narrower output.
std::vector<std::pair<int, int>> equal_operands(const NodeSpec& spec);

}  // namespace ortrain
