// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <tuple>

#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_grouped_matmul(CaseRegistry& cases) {
  struct Case {
    const char* name;
    int64_t rows, depth, width;
    std::vector<double> offsets;
  };
  const std::vector<Case> all = {
      {"uneven", 17, 7, 9, {3, 4, 17}},
      {"empty_groups", 9, 8, 1, {0, 4, 4, 9, 9}},
      {"rows_left_over", 8, 3, 7, {2, 5}},
      {"no_rows", 0, 3, 4, {0, 0}},
      {"one_group", 7, 1, 8, {7}},
      {"many_groups", 17, 2, 3, {1, 2, 3, 5, 8, 8, 9, 11, 12, 17}},
      {"no_group", 3, 2, 4, {}},
  };
  for (const Case& c : all) {
    const int64_t experts = static_cast<int64_t>(c.offsets.size());
    for (const DType type : {DType::i64, DType::i32}) {
      const CaseInput offsets = CaseInput::literal(type, {experts}, c.offsets);
      const std::string name = std::string(c.name) + (type == DType::i32 ? "_int32" : "");
      const CaseInput x = CaseInput::normal({c.rows, c.depth});
      cases.add({.op = "ortrain::GroupedMatMul",
                 .name = name,
                 .inputs = {x, CaseInput::normal({experts, c.depth, c.width}), offsets}});
      cases.add({.op = "ortrain::GroupedMatMul",
                 .name = name + "_transposed",
                 .inputs = {x, CaseInput::normal({experts, c.width, c.depth}), offsets},
                 .attributes = {{"trans_w", int64_t{1}}}});
      cases.add({.op = "ortrain::GroupedMatMulWeightGrad",
                 .name = name,
                 .inputs = {x, CaseInput::normal({c.rows, c.width}), offsets}});
    }
  }
  // Several tiles of rows, columns and depth; groups longer and shorter than a tile.
  for (const auto& [name, rows, depth, width, offsets] :
       {std::tuple<std::string, int64_t, int64_t, int64_t, std::vector<double>>{
            "tiles", 150, 40, 72, {70, 75, 140}},
        {"large_tiles", 300, 72, 136, {130, 300}}}) {
    const int64_t experts = static_cast<int64_t>(offsets.size());
    const CaseInput ends = CaseInput::literal(DType::i64, {experts}, offsets);
    for (const int64_t transposed : {0, 1}) {
      cases.add({.op = "ortrain::GroupedMatMul",
                 .name = name + (transposed ? "_transposed" : ""),
                 .inputs = {CaseInput::normal({rows, depth}),
                            CaseInput::normal(transposed ? Dims{experts, width, depth}
                                                         : Dims{experts, depth, width}),
                            ends},
                 .attributes = {{"trans_w", transposed}},
                 .check_gradient = false,
                 .tolerance = 1e-4});
    }
    cases.add({.op = "ortrain::GroupedMatMulWeightGrad",
               .name = name,
               .inputs = {CaseInput::normal({rows, depth}), CaseInput::normal({rows, width}), ends},
               .check_gradient = false,
               .tolerance = 2e-4});
  }
  const auto refuse = [&](const char* name, std::vector<double> offsets, const char* text) {
    const int64_t experts = static_cast<int64_t>(offsets.size());
    const CaseInput ends = CaseInput::literal(DType::i32, {experts}, std::move(offsets));
    cases.add({.op = "ortrain::GroupedMatMul",
               .name = name,
               .inputs = {CaseInput::normal({5, 2}), CaseInput::normal({3, 2, 4}), ends},
               .refusal = text});
    cases.add({.op = "ortrain::GroupedMatMulWeightGrad",
               .name = name,
               .inputs = {CaseInput::normal({5, 2}), CaseInput::normal({5, 4}), ends},
               .refusal = text});
  };
  refuse("beyond_the_rows", {1, 2, 6}, "offsets[2] is 6");
  refuse("negative", {-1, 2, 5}, "offsets[0] is -1");
  refuse("decreasing", {3, 2, 5}, "offsets[1] is 2; it must be in [3, 5]");
  cases.add({.op = "ortrain::GroupedMatMul",
             .name = "wrong_depth",
             .inputs = {CaseInput::normal({5, 3}), CaseInput::normal({2, 2, 4}),
                        CaseInput::int64s({1, 5})},
             .refusal = "do not fit"});
}

}  // namespace ortrain::testing
