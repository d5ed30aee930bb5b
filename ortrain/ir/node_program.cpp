// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/node_program.h"

#include "ortrain/ir/expr_builder.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/tensor_data.h"

namespace ortrain {
namespace {

std::optional<double> scalar_of(const NodeSpec& spec, size_t i) {
  const void* data = spec.constant_input(i);
  if (data == nullptr || spec.input(i).numel() != 1) return std::nullopt;
  return TensorData(spec.input(i).dtype, spec.input(i).dims, data, nullptr).to_double();
}

}  // namespace

ExprProgram elementwise_program(const NodeSpec& spec) {
  const OpDef& def = op_registry().get(spec.node().domain, spec.node().op);
  check(def.expression != nullptr, "the operator is not elementwise");
  ExprBuilder builder;
  std::vector<ExprEmitter::Operand> operands;
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    if (!spec.has_input(i)) {
      operands.emplace_back();
      continue;
    }
    const DType storage = spec.input(i).dtype;
    operands.push_back({builder.input(storage), storage, scalar_of(spec, i)});
  }
  const DType result = spec.output(0).dtype;
  ExprEmitter emitter(builder, def, spec.node(), std::move(operands), result);
  builder.output(def.expression(emitter), result);
  return builder.finish();
}

ProgramOperands::ProgramOperands(const NodeSpec& spec) {
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    if (!spec.has_input(i)) continue;
    inputs.push_back(i);
    input_dims.push_back(spec.input(i).dims);
  }
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    if (spec.has_output(i)) outputs.push_back(i);
  }
}

std::vector<std::pair<int, int>> equal_operands(const NodeSpec& spec) {
  std::vector<std::pair<int, int>> pairs;
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    for (size_t k = 0; k < spec.num_outputs(); ++k) {
      if (!spec.has_input(i) || !spec.has_output(k) || spec.input(i) != spec.output(k)) continue;
      pairs.emplace_back(static_cast<int>(i), static_cast<int>(k));
    }
  }
  return pairs;
}

}  // namespace ortrain
