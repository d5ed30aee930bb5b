// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

void add_products(CaseRegistry& cases) {
  const std::vector<std::pair<std::string, std::pair<Dims, Dims>>> shapes = {
      {"square", {{8, 8}, {8, 8}}},
      {"odd", {{7, 17}, {17, 9}}},
      {"one", {{1, 1}, {1, 1}}},
      {"empty_rows", {{0, 3}, {3, 4}}},
      {"empty_inner", {{3, 0}, {0, 4}}},
      {"empty_columns", {{3, 4}, {4, 0}}},
      {"vectors", {{9}, {9}}},
      {"vector_matrix", {{9}, {9, 7}}},
      {"matrix_vector", {{7, 9}, {9}}},
      {"vector_batch", {{5}, {3, 5, 2}}},
      {"batch_vector", {{3, 2, 5}, {5}}},
      {"shared_right", {{2, 3, 4, 5}, {5, 6}}},
      {"shared_left", {{4, 5}, {2, 3, 5, 6}}},
      {"batched", {{2, 3, 4, 5}, {2, 3, 5, 6}}},
      {"broadcast_middle", {{2, 1, 4, 5}, {2, 3, 5, 2}}},
      {"broadcast_both", {{2, 1, 3, 4}, {1, 3, 4, 2}}},
      {"broadcast_rank", {{3, 2, 4}, {2, 3, 4, 2}}},
      {"empty_batch", {{0, 2, 3}, {0, 3, 4}}},
      {"blocks", {{150, 260}, {260, 70}}},
      {"deep", {{20, 900}, {900, 33}}},
  };
  for (const auto& [name, dims] : shapes) {
    const bool small = num_elements(dims.first) < 200;
    cases.add({.op = "MatMul",
               .name = name,
               .inputs = {CaseInput::normal(dims.first), CaseInput::normal(dims.second)},
               .check_gradient = small,
               .tolerance = small ? 2e-5 : 2e-4});
  }
  for (DType type : {DType::i32, DType::i64, DType::u32, DType::u64}) {
    cases.add({.op = "MatMul",
               .name = std::string(name_of(type)),
               .inputs = {CaseInput::integers(type, {2, 3, 4}, 0, 9),
                          CaseInput::integers(type, {4, 5}, 0, 9)},
               .types = {type}});
  }
  cases.add({.op = "MatMul",
             .name = "refuses_inner_extents",
             .inputs = {CaseInput::normal({3, 4}), CaseInput::normal({5, 2})},
             .refusal = "inner extents differ"});
  cases.add({.op = "MatMul",
             .name = "refuses_scalar",
             .inputs = {CaseInput::normal({}), CaseInput::normal({5, 2})},
             .refusal = "a scalar has no matrix product"});
}

void add_fused(CaseRegistry& cases) {
  for (const int64_t trans_a : {0, 1}) {
    for (const int64_t trans_b : {0, 1}) {
      const Attributes attributes{{"transA", trans_a}, {"transB", trans_b}, {"alpha", 0.5}};
      const std::string suffix = std::string(trans_a ? "_T" : "_N") + (trans_b ? "T" : "N");
      auto matrix = [](Dims batch, int64_t rows, int64_t cols, bool transposed) {
        batch.push_back(transposed ? cols : rows);
        batch.push_back(transposed ? rows : cols);
        return CaseInput::normal(std::move(batch));
      };
      for (const auto& [name, a, b] : {std::tuple<std::string, Dims, Dims>{"plain", {}, {}},
                                       {"batched", {2, 3}, {2, 3}},
                                       {"shared_right", {2, 3}, {}},
                                       {"shared_left", {}, {3}},
                                       {"broadcast", {2, 1}, {1, 3}}}) {
        cases.add({.op = "ortrain::FusedMatMul",
                   .name = name + suffix,
                   .inputs = {matrix(a, 7, 5, trans_a), matrix(b, 5, 9, trans_b)},
                   .attributes = attributes});
      }
    }
  }
  cases.add({.op = "ortrain::FusedMatMul",
             .name = "refuses_vector",
             .inputs = {CaseInput::normal({4}), CaseInput::normal({4, 2})},
             .refusal = "at least two dimensions"});
}

void add_linear(CaseRegistry& cases) {
  for (const auto& [name, x, outputs] :
       {std::tuple<std::string, Dims, int64_t>{"matrix", {7, 9}, 17},
        {"sequence", {2, 3, 8}, 5},
        {"vector", {9}, 4},
        {"one_feature", {5, 1}, 1},
        {"empty_batch", {0, 4}, 3},
        {"no_features", {3, 0}, 4},
        {"no_outputs", {3, 4}, 0},
        {"blocks", {130, 300}, 70}}) {
    const int64_t features = x.back();
    const bool small = num_elements(x) < 200;
    for (const bool bias : {false, true}) {
      std::vector<CaseInput> inputs{CaseInput::normal(x), CaseInput::normal({outputs, features})};
      if (bias) inputs.push_back(CaseInput::normal({outputs}));
      cases.add({.op = "ortrain::Linear",
                 .name = name + (bias ? "_bias" : ""),
                 .inputs = std::move(inputs),
                 .check_gradient = small,
                 .tolerance = 1e-4});
    }
    Dims dy = x;
    dy.back() = outputs;
    for (const bool base : {false, true}) {
      std::vector<CaseInput> inputs{CaseInput::normal(dy), CaseInput::normal(x)};
      if (base) inputs.push_back(CaseInput::normal({outputs, features}));
      cases.add({.op = "ortrain::LinearWeightGrad",
                 .name = name + (base ? "_base" : ""),
                 .inputs = std::move(inputs),
                 .check_gradient = small,
                 .tolerance = 1e-4});
      if (!base) {
        cases.add({.op = "ortrain::WideLinearWeightGrad",
                   .name = name,
                   .inputs = {CaseInput::normal(dy), CaseInput::normal(x)},
                   .check_gradient = small,
                   .tolerance = 1e-4});
      }
      std::vector<CaseInput> input_grad{CaseInput::normal(dy),
                                        CaseInput::normal({outputs, features})};
      if (base) input_grad.push_back(CaseInput::normal(x));
      cases.add({.op = "ortrain::LinearInputGrad",
                 .name = name + (base ? "_base" : ""),
                 .inputs = std::move(input_grad),
                 .check_gradient = small,
                 .tolerance = 1e-4});
    }
  }
  cases.add({.op = "ortrain::LinearInputGrad",
             .name = "refuses_outputs",
             .inputs = {CaseInput::normal({3, 4}), CaseInput::normal({5, 4})},
             .refusal = "outputs of 'dy' and 'weight' differ"});
  cases.add({.op = "ortrain::Linear",
             .name = "refuses_features",
             .inputs = {CaseInput::normal({3, 4}), CaseInput::normal({5, 3})},
             .refusal = "features of 'x' and 'weight' differ"});
  cases.add(
      {.op = "ortrain::Linear",
       .name = "refuses_bias",
       .inputs = {CaseInput::normal({3, 4}), CaseInput::normal({5, 4}), CaseInput::normal({4})},
       .refusal = "outputs of 'bias' and 'weight' differ"});
  cases.add({.op = "ortrain::WideLinearWeightGrad",
             .name = "refuses_rows",
             .inputs = {CaseInput::normal({3, 4}), CaseInput::normal({5, 4})},
             .refusal = "leading extents differ"});
  cases.add({.op = "ortrain::LinearWeightGrad",
             .name = "refuses_rows",
             .inputs = {CaseInput::normal({3, 4}), CaseInput::normal({5, 4})},
             .refusal = "leading extents differ"});
}

void add_gemm(CaseRegistry& cases) {
  const std::vector<std::pair<std::string, Dims>> addends = {
      {"full", {7, 9}}, {"row", {9}}, {"row_2d", {1, 9}}, {"column", {7, 1}},
      {"scalar", {}},   {"one", {1}}, {"one_2d", {1, 1}}};
  for (int64_t mode = 0; mode < 4; ++mode) {
    const int64_t trans_a = mode & 1;
    const int64_t trans_b = mode >> 1;
    const Dims a = trans_a ? Dims{5, 7} : Dims{7, 5};
    const Dims b = trans_b ? Dims{9, 5} : Dims{5, 9};
    const std::string suffix = std::string(trans_a ? "_T" : "_N") + (trans_b ? "T" : "N");
    const Attributes attributes{
        {"transA", trans_a}, {"transB", trans_b}, {"alpha", 0.5}, {"beta", -2.0}};
    cases.add({.op = "Gemm",
               .name = "no_c" + suffix,
               .inputs = {CaseInput::normal(a), CaseInput::normal(b)},
               .attributes = attributes});
    for (const auto& [name, c] : addends) {
      cases.add({.op = "Gemm",
                 .name = name + suffix,
                 .inputs = {CaseInput::normal(a), CaseInput::normal(b), CaseInput::normal(c)},
                 .attributes = attributes});
    }
  }
  for (const auto& [name, c] : addends) {
    cases.add(
        {.op = "Gemm",
         .name = name + "_defaults",
         .inputs = {CaseInput::normal({7, 5}), CaseInput::normal({5, 9}), CaseInput::normal(c)}});
  }
  cases.add(
      {.op = "Gemm",
       .name = "single_row",
       .inputs = {CaseInput::normal({1, 5}), CaseInput::normal({5, 9}), CaseInput::normal({9})}});
  cases.add(
      {.op = "Gemm",
       .name = "empty_inner",
       .inputs = {CaseInput::normal({3, 0}), CaseInput::normal({0, 4}), CaseInput::normal({4})}});
  cases.add(
      {.op = "Gemm",
       .name = "empty",
       .inputs = {CaseInput::normal({0, 5}), CaseInput::normal({5, 4}), CaseInput::normal({4})}});
  cases.add({.op = "Gemm",
             .name = "refuses_rank",
             .inputs = {CaseInput::normal({2, 3, 4}), CaseInput::normal({4, 2})},
             .refusal = "are matrices"});
  cases.add(
      {.op = "Gemm",
       .name = "refuses_c",
       .inputs = {CaseInput::normal({3, 4}), CaseInput::normal({4, 2}), CaseInput::normal({3})},
       .refusal = "do not broadcast"});
}

}  // namespace

void register_matmul(CaseRegistry& cases) {
  add_products(cases);
  add_fused(cases);
  add_linear(cases);
  add_gemm(cases);
}

}  // namespace ortrain::testing
