// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/conv/conv_kernels.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

ConvNode forward_node(const NodeSpec& spec) {
  return {
      Direction::kForward,
      ops::conv_problem(spec.attrs(), spec.input(0).dims, spec.input(1).dims, spec.output(0).dims),
      spec.has_input(2)};
}

ConvNode input_grad_node(const NodeSpec& spec) {
  return {Direction::kInput, ops::conv_problem(spec.attrs(), spec.output(0).dims,
                                               spec.input(1).dims, spec.input(0).dims)};
}

ConvNode weight_grad_node(const NodeSpec& spec) {
  return {Direction::kWeight, ops::conv_problem(spec.attrs(), spec.input(1).dims,
                                                spec.output(0).dims, spec.input(0).dims)};
}

ConvNode transpose_node(const NodeSpec& spec) {
  return {Direction::kInput,
          ops::conv_transpose_problem(spec.attrs(), spec.input(0).dims, spec.input(1).dims,
                                      spec.output(0).dims),
          spec.has_input(2)};
}

using MakeNode = ConvNode (*)(const NodeSpec&);

std::vector<Kernel> conv_kernels(MakeNode make_node) {
  return {
      {.name = "onednn",
       .types = {DType::f32},
       .why_not = [=](const NodeSpec& spec) { return conv_onednn_refuses(make_node(spec)); },
       .make = [=](NodeSpec& spec) { return conv_onednn(spec, make_node(spec)); }},
      {.name = "depthwise",
       .why_not = [=](const NodeSpec& spec) { return conv_depthwise_refuses(make_node(spec)); },
       .make =
           [=](NodeSpec& spec) { return conv_depthwise(spec.input(0).dtype, make_node(spec)); }},
      {.name = "im2col",
       .why_not = [=](const NodeSpec& spec) { return conv_im2col_refuses(make_node(spec)); },
       .make = [=](NodeSpec& spec) { return conv_im2col(spec, make_node(spec)); }},
      {.name = "ref",
       .make =
           [=](NodeSpec& spec) { return conv_reference(spec.input(0).dtype, make_node(spec)); }},
  };
}

}  // namespace

void register_conv(KernelRegistry& registry) {
  registry.add("Conv", conv_kernels(forward_node));
  registry.add("ConvTranspose", conv_kernels(transpose_node));
  registry.add("ortrain::ConvInputGrad", conv_kernels(input_grad_node));
  registry.add("ortrain::ConvWeightGrad", conv_kernels(weight_grad_node));
}

}  // namespace ortrain::cpu
