// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_reshape(CaseRegistry& cases);
void register_reshape(CaseRegistry& cases) {
  using In = CaseInput;
  const auto reshape = [&cases](const char* name, Dims dims, std::vector<int64_t> shape,
                                Attributes attributes = {},
                                std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = "Reshape",
               .name = name,
               .inputs = {In::normal(std::move(dims)), In::int64s(std::move(shape))},
               .attributes = std::move(attributes),
               .refusal = std::move(refusal)});
  };
  reshape("merge", {2, 3, 4}, {6, 4});
  reshape("infer", {2, 3, 4}, {4, -1});
  reshape("copy_and_infer", {2, 3, 4}, {0, -1});
  reshape("to_scalar", {1, 1}, {});
  reshape("from_scalar", {}, {1, 1, 1});
  reshape("empty", {0, 3}, {3, 0}, {{"allowzero", int64_t{1}}});
  reshape("empty_infer", {0, 6}, {0, -1, 2});
  reshape("infer_zero", {0, 6}, {2, -1});
  reshape("wrong_count", {2, 3}, {4, 2}, {}, "has 6 elements");
  reshape("indivisible", {2, 3}, {4, -1}, {}, "cannot be split");
  reshape("two_inferred", {2, 3}, {-1, -1}, {}, "more than one -1");
  reshape("ambiguous", {2, 0}, {0, 0, -1}, {{"allowzero", int64_t{1}}}, "ambiguous");
  reshape("copy_beyond", {2, 3}, {6, 1, 0}, {}, "copies axis 2");
  reshape("negative", {2, 3}, {-2, -3}, {}, "negative extent");
  cases.add({.op = "Reshape",
             .name = "types",
             .inputs = {In::integers(DType::undefined, {2, 6}, 0, 2), In::int64s({3, 4})},
             .types = kAllTypes,
             .check_gradient = false});

  const auto flatten = [&cases](const char* name, Dims dims, int64_t axis) {
    cases.add({.op = "Flatten",
               .name = name,
               .inputs = {In::normal(std::move(dims))},
               .attributes = {{"axis", axis}}});
  };
  flatten("axis_1", {2, 3, 4}, 1);
  flatten("axis_0", {2, 3, 4}, 0);
  flatten("axis_last", {2, 3, 4}, 3);
  flatten("negative_axis", {2, 3, 4}, -2);
  flatten("scalar", {}, 0);
  flatten("empty", {0, 3}, 1);
  cases.add({.op = "Flatten",
             .name = "axis_out_of_range",
             .inputs = {In::normal({2, 3})},
             .attributes = {{"axis", int64_t{3}}},
             .refusal = "axis 3 is out of range"});

  cases.add({.op = "Squeeze", .name = "all", .inputs = {In::normal({1, 3, 1, 2})}});
  cases.add({.op = "Squeeze", .name = "axes", .inputs = {In::normal({1, 3, 1}), In::int64s({-1})}});
  cases.add({.op = "Squeeze",
             .name = "not_one",
             .inputs = {In::normal({1, 3}), In::int64s({1})},
             .refusal = "is not 1"});
  cases.add({.op = "Squeeze",
             .name = "twice",
             .inputs = {In::normal({1, 3}), In::int64s({0, -2})},
             .refusal = "stands twice"});
  cases.add(
      {.op = "Unsqueeze", .name = "axes", .inputs = {In::normal({2, 3}), In::int64s({-1, 0})}});
  cases.add({.op = "Unsqueeze", .name = "scalar", .inputs = {In::normal({}), In::int64s({0})}});
  cases.add({.op = "Unsqueeze",
             .name = "out_of_range",
             .inputs = {In::normal({2}), In::int64s({2})},
             .refusal = "out of range"});
}

}  // namespace ortrain::testing
