// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_slice(CaseRegistry& cases);
void register_slice(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const char* name, Dims dims, std::vector<int64_t> starts,
                            std::vector<int64_t> ends, std::optional<std::vector<int64_t>> axes,
                            std::optional<std::vector<int64_t>> steps,
                            std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = "Slice",
               .name = name,
               .inputs = {In::normal(std::move(dims)), In::int64s(std::move(starts)),
                          In::int64s(std::move(ends)), axes ? In::int64s(*axes) : In::none(),
                          steps ? In::int64s(*steps) : In::none()},
               .refusal = std::move(refusal)});
  };
  // The largest integers that survive the way through double.
  const int64_t far = int64_t{1} << 52;
  add("leading", {7, 9}, {1}, {5}, std::nullopt, std::nullopt);
  add("both", {7, 9}, {1, 2}, {5, 8}, std::nullopt, std::nullopt);
  add("last_axis", {7, 17}, {8}, {17}, {{-1}}, std::nullopt);
  add("steps", {9, 17}, {1, 0}, {9, 17}, {{0, 1}}, {{3, 2}});
  add("negative_bounds", {9}, {-4}, {-1}, {{0}}, std::nullopt);
  add("flip", {3, 8}, {-1}, {-far}, {{1}}, {{-1}});
  add("backwards", {17}, {14}, {2}, {{0}}, {{-5}});
  add("backwards_2d", {5, 7}, {4, 6}, {0, -8}, {{0, 1}}, {{-2, -3}});
  add("clamped", {5, 3}, {-far}, {far}, {{0}}, std::nullopt);
  add("empty", {5, 3}, {3}, {2}, {{0}}, std::nullopt);
  add("empty_input", {0, 3}, {0}, {far}, {{0}}, std::nullopt);
  add("huge_step", {5}, {1}, {far}, {{0}}, {{far}});
  add("view", {8, 16}, {2}, {6}, {{0}}, std::nullopt);
  add("view_inside_ones", {1, 8, 16}, {2}, {6}, {{1}}, std::nullopt);
  add("whole", {4, 4}, {0}, {4}, {{0}}, std::nullopt);
  add("zero_step", {5}, {0}, {5}, {{0}}, {{0}}, "a step is zero");
  add("lengths", {5}, {0, 1}, {5}, {{0}}, std::nullopt, "differ in length");
  add("axis_twice", {5, 5}, {0, 1}, {5, 5}, {{1, -1}}, std::nullopt, "stands twice");
  cases.add({.op = "Slice",
             .name = "int32_bounds",
             .inputs = {In::normal({9}), In::literal(DType::i32, {1}, {2}),
                        In::literal(DType::i32, {1}, {2147483647})}});
  cases.add({.op = "Slice",
             .name = "types",
             .inputs = {In::integers(DType::undefined, {4, 9}, 0, 2), In::int64s({7}),
                        In::int64s({0}), In::int64s({1}), In::int64s({-2})},
             .types = kAllTypes,
             .check_gradient = false});
  const auto grad = [&cases](const char* name, Dims dy, std::vector<int64_t> shape,
                             std::vector<int64_t> starts, std::vector<int64_t> ends,
                             std::vector<int64_t> steps,
                             std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = "ortrain::SliceGrad",
               .name = name,
               .inputs = {In::normal(std::move(dy)), In::int64s(std::move(shape)),
                          In::int64s(std::move(starts)), In::int64s(std::move(ends)), In::none(),
                          In::int64s(std::move(steps))},
               .refusal = std::move(refusal)});
  };
  grad("box", {3, 4}, {7, 9}, {1, 2}, {4, 6}, {1, 1});
  grad("strided", {3, 8}, {9, 17}, {8, 1}, {0, 17}, {-3, 2});
  grad("wide", {5, 64}, {5, 192}, {0, 64}, {5, 128}, {1, 1});
  grad("rows", {2, 17}, {9, 17}, {3, 0}, {5, 17}, {1, 1});
  grad("whole", {3, 4}, {3, 4}, {0, 0}, {3, 4}, {1, 1});
  grad("empty", {0, 4}, {3, 4}, {2, 0}, {2, 4}, {1, 1});
  grad("misfit", {3, 3}, {7, 9}, {1, 2}, {4, 6}, {1, 1}, "is no such slice");
}

}  // namespace ortrain::testing
