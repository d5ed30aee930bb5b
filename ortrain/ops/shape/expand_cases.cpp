// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_expand(CaseRegistry& cases);
void register_expand(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const char* op, const char* name, Dims dims,
                            std::vector<int64_t> second,
                            std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = op,
               .name = name,
               .inputs = {In::normal(std::move(dims)), In::int64s(std::move(second))},
               .refusal = std::move(refusal)});
  };
  add("Expand", "rows", {1, 17}, {9, 17});
  add("Expand", "columns", {9, 1}, {9, 17});
  add("Expand", "both", {3, 1, 5, 1}, {3, 2, 5, 4});
  add("Expand", "higher_rank", {3, 1}, {2, 3, 4});
  add("Expand", "two_way", {3, 4}, {2, 1, 1});
  add("Expand", "scalar", {}, {2, 3});
  add("Expand", "same", {2, 3}, {2, 3});
  add("Expand", "empty", {1, 3}, {0, 3});
  add("Expand", "misfit", {2, 3}, {2, 4}, "do not broadcast");
  add("Expand", "negative", {1, 3}, {-1, 3}, "negative");
  add("Expand", "overflow", {1, 1}, {int64_t{1} << 40, int64_t{1} << 40}, "overflows");
  cases.add({.op = "Expand",
             .name = "types",
             .inputs = {In::integers(DType::undefined, {2, 1, 3}, 0, 2), In::int64s({2, 5, 3})},
             .types = kAllTypes,
             .check_gradient = false});
  add("Expand", "wide_rows", {1, 72}, {5, 72});
  add("Expand", "wide_columns", {6, 1}, {6, 64});
  add("Tile", "both_axes", {2, 3}, {3, 2});
  add("Tile", "rows_only", {7, 9}, {4, 1});
  add("Tile", "ones", {7, 9}, {1, 1});
  add("Tile", "zero_repeats", {2, 3}, {2, 0});
  add("Tile", "empty", {0, 3}, {2, 2});
  add("Tile", "rank_3", {2, 1, 3}, {1, 3, 2});
  add("Tile", "scalar", {}, {});
  add("Tile", "wrong_length", {2, 3}, {2}, "has 1 elements");
  cases.add({.op = "Tile",
             .name = "types",
             .inputs = {In::integers(DType::undefined, {2, 3}, 0, 2), In::int64s({2, 2})},
             .types = kAllTypes,
             .check_gradient = false});
  add("ortrain::SumToShape", "rows", {9, 17}, {17});
  add("ortrain::SumToShape", "keeps_ones", {9, 17}, {1, 17});
  add("ortrain::SumToShape", "columns", {9, 17}, {9, 1});
  add("ortrain::SumToShape", "mixed", {2, 3, 4, 5}, {3, 1, 5});
  add("ortrain::SumToShape", "to_scalar", {3, 7}, {});
  add("ortrain::SumToShape", "same", {3, 7}, {3, 7});
  add("ortrain::SumToShape", "drops_ones", {1, 1, 7}, {7});
  add("ortrain::SumToShape", "empty_sum", {0, 3}, {1, 3});
  // Rows of vectors, more than one piece of a sum, more rows than a block has warps.
  const auto large = [&cases](const char* name, Dims dims, std::vector<int64_t> shape) {
    cases.add({.op = "ortrain::SumToShape",
               .name = name,
               .inputs = {In::normal(std::move(dims)), In::int64s(std::move(shape))},
               .check_gradient = false});
  };
  large("bias", {700, 72}, {72});
  large("bias_odd", {300, 67}, {67});
  large("long_rows", {3, 9000}, {3, 1});
  large("short_rows", {70, 24}, {70, 1});
  large("middle", {3, 300, 40}, {3, 1, 40});
  large("outer_and_inner", {6, 5, 33}, {5, 1});
  add("ortrain::SumToShape", "misfit", {4, 3}, {2, 3}, "is no broadcast of");
}

}  // namespace ortrain::testing
