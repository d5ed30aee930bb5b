// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_cum_sum(CaseRegistry& cases);
void register_cum_sum(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const std::string& name, Dims dims, int64_t axis,
                            std::optional<std::string> refusal = std::nullopt) {
    for (int64_t exclusive : {0, 1}) {
      for (int64_t reverse : {0, 1}) {
        cases.add(
            {.op = "CumSum",
             .name = name + (exclusive ? "_exclusive" : "") + (reverse ? "_reverse" : ""),
             .inputs = {In::normal(dims), In::literal(DType::i64, {}, {static_cast<double>(axis)})},
             .attributes = {{"exclusive", exclusive}, {"reverse", reverse}},
             .refusal = refusal});
      }
    }
  };
  add("rows", {7, 9}, 1);
  add("columns", {9, 70}, 0);
  add("middle", {2, 8, 3}, -2);
  add("two_tiles", {2, 270}, 1);
  add("one", {3, 1}, 1);
  add("empty", {3, 0}, 1);
  add("axis_out_of_range", {3}, 1, "axis 1 is out of range");
  cases.add({.op = "CumSum",
             .name = "long_line",
             .inputs = {In::normal({2, 5000}), In::literal(DType::i64, {}, {1})},
             .check_gradient = false});
  cases.add(
      {.op = "CumSum",
       .name = "integers",
       .inputs = {In::integers(DType::undefined, {3, 9}, 0, 9), In::literal(DType::i32, {}, {1})},
       .types = {DType::i32, DType::i64, DType::u32, DType::u64}});
}

}  // namespace ortrain::testing
