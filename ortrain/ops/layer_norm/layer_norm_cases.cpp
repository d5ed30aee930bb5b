// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

struct NormShape {
  std::string name;
  Dims dims;
  int64_t axis;
  Dims parameter;
};

const std::vector<NormShape> kShapes = {
    {"one", {1}, 0, {1}},
    {"row_7", {7}, -1, {7}},
    {"rows_8", {3, 8}, -1, {8}},
    {"rows_9", {2, 3, 9}, 2, {9}},
    {"rows_17", {5, 17}, -1, {17}},
    {"two_axes", {3, 4, 5}, 1, {4, 5}},
    {"all_axes", {3, 4}, 0, {3, 4}},
    {"leading_ones", {3, 8}, -1, {1, 8}},
    {"empty_rows", {0, 5}, -1, {5}},
    {"many_rows", {600, 24}, -1, {24}},
    {"rows_528", {260, 528}, -1, {528}},
    {"rows_1030", {3, 1030}, -1, {1030}},
    {"rows_20000", {2, 20000}, -1, {20000}},
};

void add_layer_norm(CaseRegistry& cases, const NormShape& s) {
  const bool small = num_elements(s.dims) < 150;
  const CaseInput x = CaseInput::normal(s.dims);
  const CaseInput parameter = CaseInput::normal(s.parameter);
  const Attributes attributes{{"axis", s.axis}, {"epsilon", 1e-3}};
  for (int affine = 0; affine < 3; ++affine) {
    std::vector<CaseInput> inputs{x};
    for (int i = 0; i < affine; ++i) inputs.push_back(parameter);
    cases.add({.op = "LayerNormalization",
               .name = s.name + "_" + std::to_string(affine),
               .inputs = inputs,
               .attributes = attributes,
               .outputs = affine == 1 ? size_t{1} : size_t{3},
               .check_gradient = small});
  }
  Dims statistics = s.dims;
  const size_t axis = s.axis < 0 ? s.dims.size() + s.axis : s.axis;
  for (size_t i = axis; i < statistics.size(); ++i) statistics[i] = 1;
  for (const DType type : {DType::f32, DType::f64}) {
    CaseInput mean = CaseInput::normal(statistics);
    CaseInput inv_std = CaseInput::positive(statistics);
    mean.dtype = inv_std.dtype = type;
    const DTypeSet types =
        type == DType::f64 ? DTypeSet{DType::f64} : DTypeSet{DType::f32, DType::f16, DType::bf16};
    for (const bool scale : {false, true}) {
      cases.add({.op = "ortrain::LayerNormalizationGrad",
                 .name = s.name + (scale ? "_scale" : "") + std::string(name_of(type)),
                 .inputs = {CaseInput::normal(s.dims), x, mean, inv_std,
                            scale ? parameter : CaseInput::none(), parameter},
                 .attributes = {{"axis", s.axis}},
                 .outputs = 3,
                 .types = types,
                 .tolerance = small ? 2e-5 : 2e-4});
    }
  }
}

void add_rms_norm(CaseRegistry& cases, const NormShape& s) {
  const bool small = num_elements(s.dims) < 150;
  const Attributes attributes{{"axis", s.axis}, {"epsilon", 1e-3}};
  for (const bool scale : {false, true}) {
    std::vector<CaseInput> inputs{CaseInput::normal(s.dims)};
    if (scale) inputs.push_back(CaseInput::normal(s.parameter));
    cases.add({.op = "RMSNormalization",
               .name = s.name + (scale ? "_scale" : ""),
               .inputs = inputs,
               .attributes = attributes,
               .check_gradient = small});
    inputs.insert(inputs.begin(), CaseInput::normal(s.dims));
    cases.add({.op = "ortrain::RMSNormalizationGrad",
               .name = s.name + (scale ? "_scale" : ""),
               .inputs = inputs,
               .attributes = attributes,
               .outputs = 2,
               .tolerance = small ? 2e-5 : 2e-4});
  }
}

}  // namespace

void register_layer_norm(CaseRegistry& cases) {
  for (const NormShape& shape : kShapes) {
    add_layer_norm(cases, shape);
    add_rms_norm(cases, shape);
  }
  cases.add({.op = "LayerNormalization",
             .name = "large_mean",
             .inputs = {CaseInput::uniform({4, 64}, 1000, 1001)},
             .types = {DType::f32},
             .check_gradient = false,
             .tolerance = 5e-5});
  cases.add({.op = "LayerNormalization",
             .name = "refuses_scale",
             .inputs = {CaseInput::normal({2, 3}), CaseInput::normal({2})},
             .refusal = "'Scale' has the shape"});
  cases.add({.op = "LayerNormalization",
             .name = "refuses_axis",
             .inputs = {CaseInput::normal({2, 3})},
             .attributes = {{"axis", int64_t{2}}},
             .refusal = "axis"});
  cases.add({.op = "RMSNormalization",
             .name = "refuses_scale",
             .inputs = {CaseInput::normal({2, 3}), CaseInput::normal({2})},
             .refusal = "'scale' has the shape"});
}

}  // namespace ortrain::testing
