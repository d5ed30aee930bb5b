// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_arg_reduce(CaseRegistry& cases);
void register_arg_reduce(CaseRegistry& cases) {
  using In = CaseInput;
  for (const char* op : {"ArgMax", "ArgMin"}) {
    const auto add = [&cases, op](const char* name, In x, int64_t axis, int64_t keepdims,
                                  int64_t last, DTypeSet types = {},
                                  std::optional<std::string> refusal = std::nullopt) {
      cases.add(
          {.op = op,
           .name = name,
           .inputs = {std::move(x)},
           .attributes = {{"axis", axis}, {"keepdims", keepdims}, {"select_last_index", last}},
           .types = types,
           .refusal = std::move(refusal)});
    };
    add("rows", In::normal({9, 17}), -1, 1, 0);
    add("columns", In::normal({9, 130}), 0, 0, 0);
    add("middle", In::normal({3, 5, 2}), 1, 0, 0);
    add("ties_first", In::integers(DType::undefined, {7, 9}, 0, 3), 1, 1, 0, kNumericTypes);
    add("ties_last", In::integers(DType::undefined, {7, 9}, 0, 3), 1, 1, 1, kNumericTypes);
    add("nan", In::literal(DType::undefined, {5}, {1, std::nan(""), 9, std::nan(""), -9}), 0, 0, 0);
    std::vector<double> line(300, 1.0);
    line[77] = line[201] = std::nan("");
    add("nan_in_long_line", In::literal(DType::undefined, {300}, line), 0, 1, 0);
    add("last_nan_in_long_line", In::literal(DType::undefined, {300}, line), 0, 1, 1);
    add("infinities", In::literal(DType::undefined, {3}, {-INFINITY, INFINITY, 0}), 0, 1, 0);
    add("long_line", In::normal({2, 40000}), 1, 1, 1);
    add("long_columns", In::normal({5000, 7}), 0, 1, 0);
    add("wide_columns", In::normal({300, 130}), 0, 1, 0);
    add("one", In::normal({4, 1}), 1, 0, 0);
    add("no_lines", In::normal({0, 3}), 1, 1, 0);
    add("empty_axis", In::normal({3, 0}), 1, 1, 0, {}, "is empty");
    add("axis_out_of_range", In::normal({3}), 1, 1, 0, {}, "axis 1 is out of range");
  }
}

}  // namespace ortrain::testing
