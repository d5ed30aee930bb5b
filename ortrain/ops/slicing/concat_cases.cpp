// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_concat(CaseRegistry& cases);
void register_concat(CaseRegistry& cases) {
  using In = CaseInput;
  const auto concat = [&cases](const char* name, std::vector<Dims> parts, int64_t axis,
                               std::optional<std::string> refusal = std::nullopt) {
    std::vector<In> inputs;
    for (Dims& dims : parts) inputs.push_back(In::normal(std::move(dims)));
    cases.add({.op = "Concat",
               .name = name,
               .inputs = std::move(inputs),
               .attributes = {{"axis", axis}},
               .refusal = std::move(refusal)});
  };
  concat("rows", {{2, 3}, {1, 3}, {4, 3}}, 0);
  concat("columns", {{7, 8}, {7, 1}, {7, 9}}, 1);
  concat("middle", {{2, 3, 4}, {2, 1, 4}}, -2);
  concat("one", {{2, 3}}, 0);
  concat("with_empty", {{2, 0}, {2, 3}}, 1);
  concat("all_empty", {{0, 3}, {0, 3}}, 0);
  concat("many", std::vector<Dims>(60, {3, 2}), 1);
  concat("misfit", {{2, 3}, {3, 3}}, 1, "does not fit");
  concat("ranks", {{2, 3}, {2}}, 0, "the first one has");
  concat("axis_out_of_range", {{2, 3}}, 2, "axis 2 is out of range");
  cases.add({.op = "Concat",
             .name = "wide_columns",
             .inputs = {In::normal({9, 16}), In::normal({9, 8}), In::normal({9, 1024})},
             .attributes = {{"axis", int64_t{1}}},
             .check_gradient = false});
  cases.add({.op = "Split",
             .name = "wide_columns",
             .inputs = {In::normal({5, 3072}), In::int64s({1024, 1024, 1024})},
             .attributes = {{"axis", int64_t{1}}},
             .outputs = 3,
             .check_gradient = false});
  cases.add({.op = "Concat",
             .name = "types",
             .inputs = {In::integers(DType::undefined, {3, 2}, 0, 2),
                        In::integers(DType::undefined, {3, 5}, 0, 2)},
             .attributes = {{"axis", int64_t{1}}},
             .types = kAllTypes,
             .check_gradient = false});

  const auto split = [&cases](const char* name, Dims dims, std::optional<std::vector<int64_t>> sizes,
                              int64_t axis, size_t outputs,
                              std::optional<std::string> refusal = std::nullopt) {
    Attributes attributes{{"axis", axis}};
    if (!sizes) attributes["num_outputs"] = static_cast<int64_t>(outputs);
    cases.add({.op = "Split",
               .name = name,
               .inputs = {In::normal(std::move(dims)), sizes ? In::int64s(*sizes) : In::none()},
               .attributes = std::move(attributes),
               .outputs = outputs,
               .refusal = std::move(refusal),
               .gradient_outputs = {outputs - 1}});
  };
  split("equal", {6, 5}, std::nullopt, 0, 3);
  split("last_smaller", {3, 7}, std::nullopt, 1, 3);
  split("sizes", {3, 7}, {{1, 4, 2}}, 1, 3);
  split("zero_part", {4, 3}, {{0, 4}}, 0, 2);
  split("rows_aligned", {8, 16}, {{4, 4}}, 0, 2);
  split("rows_unaligned", {9, 3}, {{4, 5}}, 0, 2);
  split("behind_one", {1, 8, 16}, {{2, 6}}, 1, 2);
  split("leading_outputs", {6, 2}, {{1, 2, 3}}, 0, 2);
  split("empty", {0, 3}, {{0, 0}}, 0, 2);
  split("wrong_sum", {3, 7}, {{1, 4}}, 1, 2, "do not add up");
  split("negative", {3, 7}, {{-1, 8}}, 1, 2, "negative extent");
  split("too_many", {3}, std::nullopt, 0, 7, "cannot be split into 7");
  cases.add({.op = "Split",
             .name = "all_gradients",
             .inputs = {In::normal({5, 3}), In::int64s({2, 3})},
             .outputs = 2,
             .gradient_outputs = {0, 1}});
}

}  // namespace ortrain::testing
