// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expr_interpreter.h"
#include "ortrain/ir/expr_program.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

void infer_fused(InferContext& context) {
  const ExprProgram program = ExprProgram::parse(context.attrs().string_("program"));
  if (program.num_inputs() != context.num_inputs()) {
    throw InvalidModelError(str("the expression program has ", program.num_inputs(),
                                " inputs, the node ", context.num_inputs()));
  }
  if (context.num_outputs() > program.outputs.size()) {
    throw InvalidModelError(str("the expression program has ", program.outputs.size(),
                                " outputs, the node ", context.num_outputs()));
  }
  std::vector<Shape> shapes;
  for (size_t i = 0; i < context.num_inputs(); ++i) {
    if (!context.has_input(i)) throw InvalidModelError(str("input ", i, " is absent"));
    if (context.dtype(i) != program.code[i].dtype) {
      throw DTypeError(str("input ", i, " is ", name_of(context.dtype(i)),
                           ", the expression program takes ", name_of(program.code[i].dtype)));
    }
    shapes.push_back(context.shape(i));
  }
  const Shape full = expr_shape(program, shapes);
  for (size_t k = 0; k < context.num_outputs(); ++k) {
    context.set_output(k, program.outputs[k].dtype, expr_output_shape(program, full, k));
  }
}

}  // namespace

void register_fused(OpRegistry& registry) {
  OpDef def;
  def.name = "Fused";
  def.domain = kOrtrainDomain;
  def.summary =
      "Runs a program of elementwise operations and reductions along the last axis over inputs "
      "that broadcast; see ir/expr_program.h.";
  def.inputs = {{"inputs", "T*", Arity::variadic}};
  def.outputs = {{"outputs", "T*", Arity::variadic}};
  def.attrs = {{"program", AttributeKind::string_, true}};
  def.types = {{"T*", kAllTypes}};
  def.infer = infer_fused;
  def.draws_random_numbers = true;  // some programs do
  registry.add(std::move(def));
}

}  // namespace ortrain::ops
