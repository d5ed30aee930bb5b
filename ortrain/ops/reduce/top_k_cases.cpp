// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_top_k(CaseRegistry& cases);
void register_top_k(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const char* name, const In& x, int64_t k, int64_t axis, int64_t largest,
                            DTypeSet types = {},
                            std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = "TopK",
               .name = name,
               .inputs = {x, In::int64s({k})},
               .attributes = {{"axis", axis}, {"largest", largest}},
               .outputs = 2,
               .types = types,
               .check_gradient = num_elements(x.dims) < 200,
               .refusal = std::move(refusal)});
  };
  add("rows", In::normal({9, 17}), 5, -1, 1);
  add("smallest", In::normal({9, 17}), 5, -1, 0);
  add("columns", In::normal({17, 9}), 3, 0, 1);
  add("whole_line", In::normal({3, 8}), 8, 1, 1);
  add("one", In::normal({3, 1}), 1, 1, 1);
  add("none", In::normal({3, 4}), 0, 1, 1);
  add("empty", In::normal({0, 4}), 2, 1, 1);
  add("many_lines", In::normal({70, 7}), 3, 1, 1);
  add("half_of_a_line", In::normal({2, 301}), 150, 1, 1);
  add("all_of_columns", In::uniform({70, 3}, -1, 0), 70, 0, 0);
  add("long_line", In::uniform({2, 5000}, 0, 2), 20, 1, 1);
  add("too_many", In::normal({3, 4}), 5, 1, 1, {}, "K = 5 is out of range");
  add("negative", In::normal({3, 4}), -1, 1, 1, {}, "K = -1 is out of range");
  for (const int64_t largest : {0, 1}) {
    cases.add({.op = "TopK",
               .name = largest ? "ties_largest" : "ties_smallest",
               .inputs = {In::integers(DType::undefined, {5, 9}, 0, 3), In::int64s({4})},
               .attributes = {{"largest", largest}},
               .outputs = 2,
               .types = kNumericTypes,
               .check_gradient = false});
  }
  for (const int64_t largest : {0, 1}) {
    cases.add({.op = "TopK",
               .name = largest ? "many_ties_largest" : "many_ties_smallest",
               .inputs = {In::integers(DType::undefined, {2, 600}, 0, 5), In::int64s({300})},
               .attributes = {{"largest", largest}},
               .outputs = 2,
               .types = kNumericTypes,
               .check_gradient = false});
  }
  std::vector<double> line(90, 0.0);
  for (size_t i = 0; i < line.size(); ++i) {
    line[i] = i % 7 == 0 ? std::nan("") : i % 5 == 0 ? INFINITY : i % 3 == 0 ? -0.0 : 0.0;
  }
  cases.add({.op = "TopK",
             .name = "many_nan",
             .inputs = {In::literal(DType::undefined, {90}, line), In::int64s({60})},
             .outputs = 2,
             .check_gradient = false});
  cases.add({.op = "TopK",
             .name = "nan",
             .inputs = {In::literal(DType::undefined, {4}, {1, std::nan(""), 9, -9}),
                        In::int64s({3})},
             .outputs = 2,
             .check_gradient = false});
  cases.add({.op = "NonZero",
             .name = "data_dependent",
             .inputs = {In::integers(DType::undefined, {3, 4}, 0, 2)},
             .refusal = "depends on data"});
}

}  // namespace ortrain::testing
