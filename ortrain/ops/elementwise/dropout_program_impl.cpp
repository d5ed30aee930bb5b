// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expr_builder.h"
#include "ortrain/ir/tensor_data.h"
#include "ortrain/ops/elementwise/dropout_program.h"
#include "ortrain/ops/elementwise/onnx_dropout.h"

namespace ortrain::ops {
namespace {

std::optional<double> constant_scalar(const NodeSpec& spec, size_t i) {
  const void* data = spec.constant_input(i);
  if (data == nullptr) return std::nullopt;
  return TensorData(spec.input(i).dtype, spec.input(i).dims, data, nullptr).to_double();
}

}  // namespace

ExprProgram onnx_dropout_program(const NodeSpec& spec) {
  std::optional<double> ratio = 0.5;
  std::optional<bool> training = false;
  if (spec.has_input(1)) ratio = constant_scalar(spec, 1);
  if (spec.has_input(2)) {
    const std::optional<double> mode = constant_scalar(spec, 2);
    training = mode ? std::optional(*mode != 0.0) : std::nullopt;
  }
  const OnnxDropout config = onnx_dropout(ratio, training, spec.attrs().optional_int("seed"));

  ExprBuilder builder;
  const ExprReg x = builder.input(spec.input(0).dtype);
  for (size_t i = 1; i < spec.num_inputs(); ++i) {
    if (spec.has_input(i)) builder.input(spec.input(i).dtype);
  }
  const ExprReg seed = builder.int_constant(DType::i64, config.seed);
  const double drop = config.training ? config.ratio : 0.0;
  if (spec.has_output(0)) {
    builder.output(drop > 0.0 ? builder.dropout(x, seed, drop, 0) : x, spec.output(0).dtype);
  }
  if (spec.has_output(1)) builder.output(builder.dropout_mask(seed, drop, 0), DType::boolean);
  return builder.finish();
}

}  // namespace ortrain::ops
