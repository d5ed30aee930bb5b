// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_embedding(CaseRegistry& cases) {
  struct Form {
    std::string name;
    Dims weight, indices;
    Attributes attributes = {};
  };
  const std::vector<Form> forms = {
      {"one", {1, 1}, {1}},
      {"tokens", {11, 8}, {2, 7}},
      {"scalar_index", {5, 9}, {}},
      {"vector_rows", {5}, {7}},
      {"matrix_rows", {5, 3, 4}, {6}},
      {"no_tokens", {5, 3}, {0}},
      {"no_features", {5, 0}, {3}},
      {"padding", {4, 17}, {3, 9}, {{"padding_idx", int64_t{2}}}},
      {"wide", {13, 300}, {4, 33}},
      {"often", {2, 5}, {1500}},
  };
  for (const Form& f : forms) {
    const bool small = num_elements(f.weight) < 150 && num_elements(f.indices) < 100;
    for (const DType type : {DType::i32, DType::i64}) {
      const CaseInput indices = CaseInput::integers(type, f.indices, 0, f.weight[0]);
      const std::string name = f.name + "_" + std::string(name_of(type));
      cases.add({.op = "ortrain::Embedding",
                 .name = name,
                 .inputs = {CaseInput::normal(f.weight), indices},
                 .attributes = f.attributes,
                 // The row padding_idx has a value but no gradient.
                 .check_gradient = small && f.attributes.empty()});
      Dims dy = f.indices;
      dy.insert(dy.end(), f.weight.begin() + 1, f.weight.end());
      for (const bool base : {false, true}) {
        std::vector<CaseInput> inputs{CaseInput::normal(dy), indices, CaseInput::int64s(f.weight)};
        if (base) inputs.push_back(CaseInput::normal(f.weight));
        cases.add({.op = "ortrain::EmbeddingGrad",
                   .name = name + (base ? "_base" : ""),
                   .inputs = std::move(inputs),
                   .attributes = f.attributes,
                   .check_gradient = small});
      }
    }
  }
  for (const double bad : {-1.0, 5.0}) {
    cases.add(
        {.op = "ortrain::Embedding",
         .name = bad < 0 ? "refuses_negative" : "refuses_large",
         .inputs = {CaseInput::normal({5, 3}), CaseInput::literal(DType::i64, {3}, {0, bad, 1})},
         .refusal = "at position 1 is outside of [0, 5)"});
    cases.add(
        {.op = "ortrain::EmbeddingGrad",
         .name = bad < 0 ? "refuses_negative" : "refuses_large",
         .inputs = {CaseInput::normal({3, 3}), CaseInput::literal(DType::i64, {3}, {0, bad, 1}),
                    CaseInput::int64s({5, 3})},
         .refusal = "at position 1 is outside of [0, 5)"});
  }
  cases.add({.op = "ortrain::EmbeddingGrad",
             .name = "refuses_shape",
             .inputs = {CaseInput::normal({3, 3}), CaseInput::integers(DType::i64, {3}, 0, 2),
                        CaseInput::int64s({5, 4})},
             .refusal = "do not fit"});
}

}  // namespace ortrain::testing
