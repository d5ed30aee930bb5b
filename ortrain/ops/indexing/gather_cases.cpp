// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_gather(CaseRegistry& cases);
void register_gather(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const char* name, Dims data, In indices, int64_t axis,
                            std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = "Gather",
               .name = name,
               .inputs = {In::normal(std::move(data)), std::move(indices)},
               .attributes = {{"axis", axis}},
               .refusal = std::move(refusal)});
  };
  add("rows", {9, 17}, In::integers(DType::i64, {7}, 0, 9), 0);
  add("repeated", {3, 4}, In::integers(DType::i64, {8, 9}, 0, 3), 0);
  add("negative", {5, 3}, In::int64s({-1, 0, -5}), 0);
  add("last_axis", {4, 7}, In::integers(DType::i32, {2, 3}, -7, 7), -1);
  add("middle_axis", {3, 5, 2}, In::integers(DType::i64, {4}, 0, 5), 1);
  add("scalar_index", {5, 3}, In::literal(DType::i64, {}, {2}), 0);
  add("no_indices", {5, 3}, In::int64s({}), 0);
  add("empty_slices", {5, 0}, In::int64s({1, 4}), 0);
  add("wide_rows", {4, 600}, In::integers(DType::i64, {9}, 0, 4), 0);
  add("too_large", {5, 3}, In::int64s({1, 5}), 0, "indices[1] = 5 is out of range");
  add("too_small", {5, 3}, In::int64s({-6}), 0, "out of range");
  add("empty_data", {0, 3}, In::int64s({0}), 0, "out of range");
  add("axis_out_of_range", {5, 3}, In::int64s({0}), 2, "axis 2 is out of range");
  cases.add({.op = "Gather",
             .name = "types",
             .inputs = {In::integers(DType::undefined, {6, 3}, 0, 2), In::int64s({5, 0, 2})},
             .types = kAllTypes,
             .check_gradient = false});
  const auto grad = [&cases](const char* name, Dims dy, In indices, std::vector<int64_t> shape,
                             int64_t axis, std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = "ortrain::GatherGrad",
               .name = name,
               .inputs = {In::normal(std::move(dy)), std::move(indices),
                          In::int64s(std::move(shape))},
               .attributes = {{"axis", axis}},
               .refusal = std::move(refusal)});
  };
  grad("rows", {7, 17}, In::integers(DType::i64, {7}, -9, 9), {9, 17}, 0);
  grad("wide", {9, 600}, In::integers(DType::i64, {9}, 0, 3), {3, 600}, 0);
  grad("last_axis", {4, 2, 3}, In::integers(DType::i32, {2, 3}, 0, 7), {4, 7}, 1);
  grad("no_indices", {0, 3}, In::int64s({}), {5, 3}, 0);
  // Lists of many indices, targets of more than one block of the prefix sum, rows of vectors.
  const auto large = [&cases](const char* name, int64_t indices, int64_t targets, int64_t inner) {
    cases.add({.op = "ortrain::GatherGrad",
               .name = name,
               .inputs = {In::normal({indices, inner}), In::integers(DType::i64, {indices}, 0, targets),
                          In::int64s({targets, inner})},
               .check_gradient = false,
               .tolerance = 1e-4});
  };
  large("long_lists", 4500, 3, 5);
  large("many_targets", 700, 5000, 1);
  large("vectors", 300, 40, 48);
  grad("misfit", {7, 3}, In::int64s({1}), {5, 3}, 0, "expected");
  grad("too_large", {1, 3}, In::int64s({5}), {5, 3}, 0, "out of range");
}

}  // namespace ortrain::testing
