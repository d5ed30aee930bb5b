// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

const std::vector<Dims> kShapes = {{3, 5}, {}, {0, 4}, {1031}};

// Parameters, gradients and positive states of several shapes.
std::vector<CaseInput> tensors(size_t states) {
  std::vector<CaseInput> result;
  for (size_t kind = 0; kind < 2 + states; ++kind) {
    for (const Dims& dims : kShapes) {
      result.push_back(kind < 2 ? CaseInput::normal(dims) : CaseInput::positive(dims));
    }
  }
  return result;
}

void add_step(CaseRegistry& cases, const std::string& op, const std::string& name, size_t states,
              Attributes attributes, std::vector<CaseInput> scalars) {
  std::vector<CaseInput> inputs = std::move(scalars);
  for (CaseInput& tensor : tensors(states)) inputs.push_back(std::move(tensor));
  cases.add({.op = "ortrain::" + op,
             .name = name,
             .inputs = std::move(inputs),
             .attributes = std::move(attributes),
             .outputs = (1 + states) * kShapes.size(),
             .check_gradient = false});
}

CaseInput number(double value) { return CaseInput::literal(DType::f64, {}, {value}); }
CaseInput step(double value) { return CaseInput::literal(DType::i64, {}, {value}); }
CaseInput flag(double value) { return CaseInput::literal(DType::boolean, {}, {value}); }

}  // namespace

void register_optimizer_steps(CaseRegistry& cases);
void register_optimizer_steps(CaseRegistry& cases) {
  const std::vector<CaseInput> first{number(0.1), step(1), CaseInput::none(), CaseInput::none()};
  const std::vector<CaseInput> clipped{number(0.1), step(7), number(0.25), flag(0)};
  const std::vector<CaseInput> skipped{number(0.1), step(7), number(0.25), flag(1)};
  const auto add = [&](const std::string& op, const std::string& name, size_t states,
                       const Attributes& attributes) {
    add_step(cases, op, name + "_first", states, attributes, first);
    add_step(cases, op, name + "_clipped", states, attributes, clipped);
    add_step(cases, op, name + "_skipped", states, attributes, skipped);
  };
  add("SgdStep", "plain", 0, {});
  add("SgdStep", "decay", 0, {{"weight_decay", 0.1}});
  add("SgdStep", "momentum", 1, {{"momentum", 0.9}, {"dampening", 0.2}});
  add("SgdStep", "nesterov", 1, {{"momentum", 0.9}, {"nesterov", int64_t{1}}});
  for (const char* mode : {"decoupled", "after", "l2"}) {
    add("AdamStep", mode, 2, {{"weight_decay", 0.1}, {"decay_mode", std::string(mode)}});
  }
  add("AdamStep", "uncorrected", 2, {{"bias_correction", int64_t{0}}});
  add("LambStep", "decay", 2, {{"weight_decay", 0.1}});
  add("LambStep", "bounded", 2,
      {{"ratio_min", 0.5}, {"ratio_max", 0.75}, {"bias_correction", int64_t{0}}});
  add("AdagradStep", "plain", 1, {});
  add("AdagradStep", "decay", 1, {{"weight_decay", 0.1}, {"rate_decay", 0.5}});

  for (const std::vector<CaseInput>& scalars : {first, clipped, skipped}) {
    std::vector<CaseInput> inputs = scalars;
    for (CaseInput& tensor : tensors(2)) inputs.push_back(std::move(tensor));
    cases.add({.op = "ortrain::LambMoments",
               .name = "decay",
               .inputs = std::move(inputs),
               .attributes = {{"weight_decay", 0.1}},
               .outputs = 1 + 2 * kShapes.size(),
               .check_gradient = false});
    const auto count = static_cast<int64_t>(kShapes.size());
    inputs = {scalars[0], scalars[1],
              CaseInput::literal(DType::f64, {count, 2}, {4, 2, 0, 1, 3, 0, 1, 9}), scalars[3]};
    for (CaseInput& tensor : tensors(1)) inputs.push_back(std::move(tensor));
    // The states stand behind the parameters; the second of them, v, is positive.
    cases.add({.op = "ortrain::LambUpdate",
               .name = "decay",
               .inputs = std::move(inputs),
               .attributes = {{"weight_decay", 0.1}, {"ratio_max", 1.25}},
               .outputs = kShapes.size(),
               .check_gradient = false});
  }

  std::vector<CaseInput> gradients;
  for (const Dims& dims : kShapes) gradients.push_back(CaseInput::normal(dims));
  cases.add({.op = "ortrain::GradientNorm",
             .name = "several",
             .inputs = gradients,
             .check_gradient = false});
  for (const double max_norm : {0.0, 0.5, 100.0}) {
    for (const double norm : {3.0, 0.0}) {
      cases.add({.op = "ortrain::ClipFactor",
                 .name = "scaled",
                 .inputs = {number(norm), number(8)},
                 .attributes = {{"max_norm", max_norm}},
                 .outputs = 3,
                 .types = {DType::f64},
                 .check_gradient = false});
    }
    cases.add({.op = "ortrain::ClipFactor",
               .name = "unscaled",
               .inputs = {number(3)},
               .attributes = {{"max_norm", max_norm}},
               .outputs = 2,
               .types = {DType::f64},
               .check_gradient = false});
  }

  const auto refuse = [&](const std::string& op, const std::string& name,
                          std::vector<CaseInput> inputs, Attributes attributes,
                          const std::string& text, size_t outputs = 1) {
    cases.add({.op = op,
               .name = name,
               .inputs = std::move(inputs),
               .attributes = std::move(attributes),
               .outputs = outputs,
               .types = {DType::f32},
               .refusal = text});
  };
  const CaseInput none = CaseInput::none(), tensor = CaseInput::normal({3});
  refuse("ortrain::SgdStep", "refuses_shapes",
         {number(1), step(1), none, none, tensor, CaseInput::normal({4})}, {},
         "the gradient 0 has shape [4], the parameter [3]");
  refuse("ortrain::SgdStep", "refuses_counts", {number(1), step(1), none, none, tensor}, {},
         "2 tensors for each parameter");
  refuse("ortrain::AdamStep", "refuses_rate",
         {CaseInput::literal(DType::f64, {2}, {1, 1}), step(1), none, none, tensor, tensor, tensor,
          tensor},
         {}, "the learning rate has shape [2]", 3);
  refuse("ortrain::AdamStep", "refuses_outputs",
         {number(1), step(1), none, none, tensor, tensor, tensor, tensor}, {},
         "has 2 outputs, needs 3", 2);
  const double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& [name, value] :
       {std::pair{"beta1", 1.0}, {"beta2", -0.1}, {"epsilon", kNan}, {"weight_decay", -1.0}}) {
    refuse("ortrain::AdamStep", str("refuses_", name),
           {number(1), step(1), none, none, tensor, tensor, tensor, tensor}, {{name, value}},
           str("'", name, "' is "), 3);
  }
  refuse("ortrain::LambStep", "refuses_ratio_min",
         {number(1), step(1), none, none, tensor, tensor, tensor, tensor}, {{"ratio_min", kNan}},
         "'ratio_min' is nan, expected a number", 3);
  refuse("ortrain::ClipFactor", "refuses_max_norm", {number(3)}, {{"max_norm", -1.0}},
         "'max_norm' is -1", 2);
  refuse("ortrain::AdamStep", "refuses_mode",
         {number(1), step(1), none, none, tensor, tensor, tensor, tensor},
         {{"decay_mode", std::string("other")}}, "is none of decoupled, after, l2", 3);
  refuse("ortrain::LambStep", "refuses_state",
         {number(1), step(1), none, none, tensor, tensor, tensor, CaseInput::normal({3, 1})}, {},
         "the state 0 has shape [3, 1]", 3);
  refuse("ortrain::LambMoments", "refuses_outputs",
         {number(1), step(1), none, none, tensor, tensor, tensor, tensor}, {},
         "has 1 outputs, needs 3, the norms and the next states");
  refuse("ortrain::LambUpdate", "refuses_norms",
         {number(1), step(1), CaseInput::literal(DType::f64, {2}, {1, 1}), none, tensor, tensor,
          tensor},
         {}, "the norms have shape [2], expected [1, 2]");
  refuse("ortrain::AdagradStep", "refuses_types",
         {number(1), step(1), none, none, tensor, CaseInput::literal(DType::f64, {3}, {1, 2, 3}),
          tensor},
         {}, "the gradient 0 is float64", 2);
  refuse("ortrain::ClipFactor", "refuses_shape",
         {CaseInput::literal(DType::f64, {2}, {1, 1}), none}, {}, "the norm has shape [2]");
}

}  // namespace ortrain::testing
