// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/tensor_data.h"
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_constant_of_shape(CaseRegistry& cases);
void register_constant_of_shape(CaseRegistry& cases) {
  using In = CaseInput;
  cases.add({.op = "ConstantOfShape", .name = "zeros", .inputs = {In::int64s({2, 3})}});
  cases.add({.op = "ConstantOfShape", .name = "scalar", .inputs = {In::int64s({})}});
  cases.add({.op = "ConstantOfShape", .name = "empty", .inputs = {In::int64s({0, 3})}});
  cases.add({.op = "ConstantOfShape",
             .name = "ints",
             .inputs = {In::int64s({9})},
             .attributes = {{"value", TensorData::int64s({7})}}});
  cases.add({.op = "ConstantOfShape",
             .name = "bool",
             .inputs = {In::int64s({3, 17})},
             .attributes = {
                 {"value", TensorData::from_values<uint8_t>(DType::boolean, {1}, {1})}}});
  cases.add({.op = "ConstantOfShape",
             .name = "negative",
             .inputs = {In::int64s({-1, 3})},
             .refusal = "negative extent"});
  cases.add({.op = "ConstantOfShape",
             .name = "overflow",
             .inputs = {In::int64s({int64_t{1} << 40, int64_t{1} << 40})},
             .refusal = "overflows"});
  cases.add({.op = "Constant",
             .name = "tensor",
             .inputs = {},
             .attributes = {{"value", TensorData::from_values<float>(DType::f32, {2}, {1, 2})}}});
  cases.add({.op = "Constant",
             .name = "ints",
             .inputs = {},
             .attributes = {{"value_ints", std::vector<int64_t>{3, -1}}}});
  cases.add({.op = "Constant",
             .name = "int",
             .inputs = {},
             .attributes = {{"value_int", int64_t{5}}}});
  cases.add({.op = "Constant",
             .name = "float",
             .inputs = {},
             .attributes = {{"value_float", 0.5}}});
  cases.add({.op = "Constant",
             .name = "floats",
             .inputs = {},
             .attributes = {{"value_floats", std::vector<double>{0.5, 2}}}});
  cases.add({.op = "Constant",
             .name = "string",
             .inputs = {},
             .attributes = {{"value_string", std::string("a")}},
             .refusal = "value_string"});
  cases.add({.op = "Constant", .name = "nothing", .inputs = {}, .refusal = "exactly one"});
  const auto eye = [&cases](const char* name, Dims dims, int64_t k) {
    cases.add({.op = "EyeLike",
               .name = name,
               .inputs = {In::normal(std::move(dims))},
               .attributes = {{"k", k}},
               .types = kAllTypes});
  };
  eye("square", {4, 4}, 0);
  eye("above", {3, 5}, 2);
  eye("below", {5, 3}, -3);
  eye("outside", {3, 3}, 7);
  cases.add({.op = "EyeLike",
             .name = "dtype",
             .inputs = {In::normal({3, 4})},
             .attributes = {{"dtype", static_cast<int64_t>(DType::i32)}}});
  cases.add({.op = "EyeLike",
             .name = "rank_1",
             .inputs = {In::normal({3})},
             .refusal = "must be a matrix"});
}

}  // namespace ortrain::testing
