// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

constexpr DTypeSet kHalfTypes{DType::f16, DType::bf16};

CaseInput with_type(CaseInput input, DType dtype) {
  input.dtype = dtype;
  return input;
}

void add_training(CaseRegistry& cases) {
  struct Case {
    const char* name;
    Dims x;
  };
  for (const Case& c :
       {Case{"plane", {3, 4, 5, 7}}, Case{"image", {2, 3, 13, 11}}, Case{"matrix", {9, 7}},
        Case{"line", {2, 3, 17}}, Case{"volume", {2, 3, 2, 3, 4}}, Case{"one_channel", {2, 1, 8}},
        Case{"two_values", {2, 8}}}) {
    const Dims channels{c.x[1]};
    const CaseInput vector = CaseInput::normal(channels);
    const CaseInput positive = CaseInput::positive(channels);
    // The gradient comes in through every output.
    cases.add({.op = "ortrain::BatchNormTraining",
               .name = c.name,
               .inputs = {CaseInput::normal(c.x), vector, vector, vector, positive},
               .attributes = {{"momentum", 0.3}, {"epsilon", 1e-3}},
               .outputs = 5,
               .types = kFullFloatTypes,
               .gradient_outputs = {0, 1, 2, 3, 4}});
    cases.add({.op = "ortrain::BatchNormTraining",
               .name = std::string(c.name) + "_mixed",
               .inputs = {CaseInput::normal(c.x), with_type(vector, DType::f32),
                          with_type(vector, DType::f32), with_type(vector, DType::f32),
                          with_type(positive, DType::f32)},
               .outputs = 5,
               .types = kHalfTypes});
    cases.add({.op = "ortrain::BatchNormTraining",
               .name = std::string(c.name) + "_plain",
               .inputs = {CaseInput::normal(c.x)}});
    cases.add({.op = "ortrain::BatchNormGrad",
               .name = c.name,
               .inputs = {CaseInput::normal(c.x), CaseInput::normal(c.x), vector, vector, positive},
               .outputs = 3,
               .types = kFullFloatTypes});
    cases.add({.op = "ortrain::BatchNormGrad",
               .name = std::string(c.name) + "_statistics",
               .inputs = {CaseInput::none(), CaseInput::normal(c.x), vector, vector, positive,
                          vector, vector, vector, vector},
               .attributes = {{"momentum", 0.3}},
               .outputs = 3,
               .types = kFullFloatTypes});
    cases.add(
        {.op = "ortrain::BatchNormGrad",
         .name = std::string(c.name) + "_mixed",
         .inputs = {CaseInput::normal(c.x), CaseInput::normal(c.x), with_type(vector, DType::f32),
                    with_type(vector, DType::f32), with_type(positive, DType::f32)},
         .outputs = 3,
         .types = kHalfTypes});
  }
  for (const Case& c : {Case{"many_rows", {700, 5}}, Case{"large", {3, 2, 72, 128}},
                        Case{"many_images", {300, 2, 40}}}) {
    const CaseInput x = CaseInput::normal(c.x), vector = CaseInput::normal({c.x[1]});
    const CaseInput positive = CaseInput::positive({c.x[1]});
    cases.add({.op = "ortrain::BatchNormTraining",
               .name = c.name,
               .inputs = {x, vector, vector, vector, positive},
               .outputs = 5,
               .types = kFullFloatTypes,
               .check_gradient = false,
               .tolerance = 1e-4});
    cases.add({.op = "ortrain::BatchNormGrad",
               .name = c.name,
               .inputs = {x, x, vector, vector, positive},
               .outputs = 3,
               .types = kFullFloatTypes,
               .tolerance = 5e-4});
  }
  cases.add({.op = "ortrain::BatchNormTraining",
             .name = "far_from_zero",
             .inputs = {CaseInput::uniform({4, 3, 9}, 1000.0, 1001.0)},
             .tolerance = 2e-4});  // a float32 mean near 1000 is rounded to 6e-5
  cases.add({.op = "ortrain::BatchNormTraining",
             .name = "empty_batch",
             .inputs = {CaseInput::normal({0, 3, 2}), CaseInput::normal({3}),
                        CaseInput::normal({3}), CaseInput::normal({3}), CaseInput::positive({3})},
             .outputs = 3});
  cases.add({.op = "ortrain::BatchNormTraining",
             .name = "one_value",
             .inputs = {CaseInput::normal({1, 3, 1})},
             .refusal = "more than one value per channel"});
  cases.add({.op = "ortrain::BatchNormTraining",
             .name = "wrong_scale",
             .inputs = {CaseInput::normal({2, 3, 4}), CaseInput::normal({4})},
             .refusal = "must be [3]"});
}

void add_batch_normalization(CaseRegistry& cases) {
  for (const Dims& x : {Dims{2, 3, 4, 5}, Dims{9, 7}, Dims{2, 3, 17}}) {
    const CaseInput vector = CaseInput::normal({x[1]}), positive = CaseInput::positive({x[1]});
    const std::string rank = std::to_string(x.size());
    cases.add({.op = "BatchNormalization",
               .name = "rank_" + rank,
               .inputs = {CaseInput::normal(x), vector, vector, vector, positive}});
    cases.add({.op = "BatchNormalization",
               .name = "rank_" + rank + "_training",
               .inputs = {CaseInput::normal(x), vector, vector, vector, positive},
               .attributes = {{"training_mode", int64_t{1}}, {"momentum", 0.7}},
               .outputs = 3,
               .gradient_outputs = {0, 1, 2}});
    cases.add({.op = "ortrain::BatchNormInferenceGrad",
               .name = "rank_" + rank,
               .inputs = {CaseInput::normal(x), CaseInput::normal(x), vector, vector, positive},
               .outputs = 5});
  }
  cases.add({.op = "BatchNormalization",
             .name = "mixed",
             .inputs = {CaseInput::normal({2, 3, 5}), with_type(CaseInput::normal({3}), DType::f32),
                        with_type(CaseInput::normal({3}), DType::f32),
                        with_type(CaseInput::normal({3}), DType::f64),
                        with_type(CaseInput::positive({3}), DType::f64)},
             .types = kHalfTypes});
  cases.add({.op = "BatchNormalization",
             .name = "wrong_mean",
             .inputs = {CaseInput::normal({2, 3, 4}), CaseInput::normal({3}),
                        CaseInput::normal({3}), CaseInput::normal({2}), CaseInput::positive({3})},
             .refusal = "input 3 is [2]"});
  cases.add({.op = "BatchNormalization",
             .name = "statistics_without_training",
             .inputs = {CaseInput::normal({2, 3, 4}), CaseInput::normal({3}),
                        CaseInput::normal({3}), CaseInput::normal({3}), CaseInput::positive({3})},
             .outputs = 2,
             .refusal = "training_mode 1 only"});
}

void add_instance(CaseRegistry& cases) {
  for (const Dims& x : {Dims{2, 3, 17}, Dims{3, 2, 4, 5}, Dims{1, 2, 2, 3, 4}, Dims{0, 3, 8}}) {
    const CaseInput vector = CaseInput::normal({x[1]});
    const std::string name = "rank_" + std::to_string(x.size()) + (x[0] == 0 ? "_empty" : "");
    cases.add({.op = "InstanceNormalization",
               .name = name,
               .inputs = {CaseInput::normal(x), vector, vector},
               .attributes = {{"epsilon", 1e-3}}});
    cases.add({.op = "ortrain::InstanceNormGrad",
               .name = name,
               .inputs = {CaseInput::normal(x), CaseInput::normal(x), vector},
               .attributes = {{"epsilon", 1e-3}},
               .outputs = 3});
  }
  cases.add({.op = "InstanceNormalization",
             .name = "matrix",
             .inputs = {CaseInput::normal({2, 3}), CaseInput::normal({3}), CaseInput::normal({3})},
             .refusal = "needs [N, C, spatial...]"});
}

}  // namespace

void register_batch_norm(CaseRegistry& cases) {
  add_training(cases);
  add_batch_normalization(cases);
  add_instance(cases);
}

}  // namespace ortrain::testing
