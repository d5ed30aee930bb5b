// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_reduce(CaseRegistry& cases);
void register_reduce(CaseRegistry& cases) {
  using In = CaseInput;
  const std::vector<const char*> ops = {
      "ReduceSum", "ReduceMean", "ReduceMax",       "ReduceMin",    "ReduceProd",
      "ReduceL1",  "ReduceL2",   "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"};
  for (const std::string op : ops) {
    const auto add = [&cases, &op](const char* name, Dims dims,
                                   std::optional<std::vector<int64_t>> axes, int64_t keepdims = 1,
                                   int64_t noop = 0) {
      cases.add({.op = op,
                 .name = name,
                 .inputs = {op == "ReduceLogSum" ? In::positive(std::move(dims))
                                                 : In::normal(std::move(dims)),
                            axes ? In::int64s(*axes) : In::none()},
                 .attributes = {{"keepdims", keepdims}, {"noop_with_empty_axes", noop}},
                 .tolerance = 1e-4});
    };
    add("rows", {9, 17}, {{1}});
    add("columns", {9, 17}, {{0}}, 0);
    add("all", {3, 7}, std::nullopt, 0);
    add("all_kept", {3, 7}, std::nullopt);
    add("middle", {3, 8, 5}, {{1}}, 0);
    add("outer_and_inner", {3, 4, 5}, {{0, -1}});
    add("two_and_two", {2, 3, 2, 3}, {{1, 3}}, 0);
    add("one_element", {3, 1, 2}, {{1}}, 0);
    add("scalar", {}, std::nullopt);
    add("empty_axes", {2, 3}, {{}}, 0);
    add("no_operation", {2, 3}, {{}}, 1, 1);
    add("no_outputs", {0, 3}, {{1}});
    cases.add({.op = op,
               .name = "long_rows",
               .inputs = {In::uniform({2, 1000}, 0.99, 1.01), In::int64s({1})},
               .check_gradient = false,
               .tolerance = 1e-4});
    cases.add({.op = op,
               .name = "axis_out_of_range",
               .inputs = {In::normal({2, 3}), In::int64s({2})},
               .refusal = "axis 2 is out of range"});
    cases.add({.op = op,
               .name = "nothing_to_reduce",
               .inputs = {In::normal({3, 0}), In::int64s({1})},
               .check_gradient = false});
    if (op == "ReduceLogSumExp" || op == "ortrain::WideReduceSum") continue;
    cases.add({.op = op,
               .name = "integers",
               .inputs = {In::integers(DType::undefined, {3, 4}, 1, 5), In::int64s({0})},
               .types = {DType::i32, DType::i64, DType::u32, DType::u64}});
  }
  for (const char* op : {"ReduceSum", "ortrain::WideReduceSum", "ReduceMean", "ReduceMax",
                         "ReduceL1", "ReduceSumSquare", "ReduceLogSumExp"}) {
    const auto large = [&cases, op](const char* name, Dims dims, std::vector<int64_t> axes) {
      cases.add({.op = op,
                 .name = name,
                 .inputs = {In::uniform(std::move(dims), -1, 1), In::int64s(std::move(axes))},
                 .types = kFloatTypes,
                 .check_gradient = false,
                 .tolerance = 5e-4});
    };
    large("all_blocks", {3, 40000}, {0, 1});
    large("long_columns", {5000, 33}, {0});
    large("wide_columns", {70, 1500}, {0});
    large("packed_columns", {700, 264}, {0});
    large("column_blocks", {300, 2, 9, 40}, {0, 2});
    large("run_blocks", {70, 3, 500}, {0, 2});
    large("short_rows", {700, 9}, {1});
    large("short_columns", {5000, 7}, {0});
    large("short_column_blocks", {4, 3, 100, 8}, {0, 2});
  }
  for (const char* op : {"ReduceMax", "ReduceMin"}) {
    cases.add({.op = op,
               .name = "small_types",
               .inputs = {In::integers(DType::undefined, {3, 9}, 0, 2), In::int64s({1})},
               .types = {DType::i8, DType::u8, DType::boolean}});
    cases.add({.op = op,
               .name = "nan",
               .inputs = {In::literal(DType::undefined, {2, 3}, {1, std::nan(""), 3, 4, 5, 6}),
                          In::int64s({1})},
               .check_gradient = false});
    cases.add({.op = op,
               .name = "empty_integers",
               .inputs = {In::integers(DType::undefined, {2, 0}, 0, 2), In::int64s({1})},
               .types = {DType::i8, DType::u8, DType::i32, DType::i64, DType::boolean}});
  }
  cases.add({.op = "ReduceLogSumExp",
             .name = "infinities",
             .inputs = {In::literal(DType::undefined, {4, 3},
                                    {INFINITY, 0, 1, -INFINITY, -INFINITY, -INFINITY, INFINITY,
                                     std::nan(""), 0, -INFINITY, 2, INFINITY}),
                        In::int64s({1})},
             .check_gradient = false});
  cases.add({.op = "ReduceSum",
             .name = "many_integers",
             .inputs = {In::integers(DType::undefined, {2, 30000}, 0, 9), In::int64s({1})},
             .types = {DType::i32, DType::i64, DType::u32, DType::u64}});
  cases.add({.op = "ReduceMean",
             .name = "empty_integers",
             .inputs = {In::integers(DType::i64, {2, 0}, 0, 2), In::int64s({1})},
             .refusal = "nothing to reduce"});
  for (const std::vector<double>& x :
       {std::vector<double>{2, 0, -3, 4}, {0, 5, 0, 1}, {1, 2, 3, 4}}) {
    cases.add({.op = "ReduceProd",
               .name = x[1] == 2   ? "no_zeros"
                       : x[0] == 0 ? "two_zeros"
                                   : "one_zero",
               .inputs = {In::literal(DType::undefined, {1, 4}, x), In::int64s({1})}});
  }
  cases.add({.op = "ortrain::ReduceProdGrad",
             .name = "outer_and_inner",
             .inputs = {In::normal({1, 4, 1}), In::normal({3, 4, 5})},
             .attributes = {{"axes", std::vector<int64_t>{0, 2}}}});
  cases.add({.op = "ortrain::ReduceProdGrad",
             .name = "misfit",
             .inputs = {In::normal({3, 4, 1}), In::normal({3, 4, 5})},
             .attributes = {{"axes", std::vector<int64_t>{0, 2}}},
             .refusal = "expected"});
}

}  // namespace ortrain::testing
