// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_pad(CaseRegistry& cases);
void register_pad(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const char* op, const std::string& mode, const std::string& name,
                            Dims dims, std::vector<int64_t> pads,
                            std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = op,
               .name = mode + "_" + name,
               .inputs = {In::normal(std::move(dims)), In::int64s(std::move(pads))},
               .attributes = {{"mode", mode}},
               .refusal = std::move(refusal)});
  };
  for (const char* mode : {"constant", "reflect", "edge", "wrap"}) {
    add("Pad", mode, "matrix", {5, 7}, {1, 2, 3, 0});
    add("Pad", mode, "rank_1", {9}, {3, 4});
    add("Pad", mode, "sequence", {2, 5, 24}, {0, 1, 0, 0, 2, 0});
    add("Pad", mode, "vectors", {3, 32}, {1, 8, 0, 16});
    add("Pad", mode, "rank_4", {1, 2, 4, 5}, {0, 0, 1, 2, 0, 0, 2, 1});
    add("Pad", mode, "nothing", {3, 4}, {0, 0, 0, 0});
    add("Pad", mode, "beyond_extent", {3}, {7, 8});
    add("Pad", mode, "one_element", {1, 2}, {2, 0, 1, 0});
    add("Pad", mode, "scalar", {}, {});
    add("Pad", mode, "crop", {6, 7}, {-1, -2, 0, -1});
    add("Pad", mode, "crop_and_grow", {6, 7}, {-1, 2, 2, -3});
    add("Pad", mode, "wrong_length", {6, 7}, {1, 1}, "expected two for each");
    add("Pad", mode, "too_much_crop", {3}, {-2, -2}, "would have the shape");
  }
  add("Pad", "constant", "empty", {0, 3}, {2, 0, 0, 1});
  add("Pad", "edge", "empty", {0, 3}, {2, 0, 0, 1}, "is empty");
  add("Pad", "mirror", "unknown", {3}, {1, 1}, "none of constant");
  cases.add({.op = "Pad",
             .name = "value",
             .inputs = {In::normal({4, 3}), In::int64s({1, 0, 2, 2}), In::normal({})}});
  cases.add({.op = "Pad",
             .name = "value_crop",
             .inputs = {In::normal({4, 3}), In::int64s({1, -1, 2, 2}), In::normal({})}});
  cases.add({.op = "Pad",
             .name = "axes",
             .inputs = {In::normal({4, 3, 5}), In::int64s({1, 2, 0, 1}), In::none(),
                        In::int64s({-1, 0})}});
  cases.add({.op = "Pad",
             .name = "axes_reflect",
             .inputs = {In::normal({4, 3, 5}), In::int64s({1, 2, 0, 1}), In::none(),
                        In::int64s({-1, 0})},
             .attributes = {{"mode", std::string("reflect")}}});
  for (const char* mode : {"constant", "reflect"}) {
    cases.add({.op = "Pad",
               .name = std::string("types_") + mode,
               .inputs = {In::integers(DType::undefined, {3, 4}, 0, 2), In::int64s({1, 2, 1, 0})},
               .attributes = {{"mode", std::string(mode)}},
               .types = kAllTypes,
               .check_gradient = false});
  }
  for (const char* mode : {"reflect", "edge", "wrap"}) {
    cases.add({.op = "ortrain::PadGrad",
               .name = mode,
               .inputs = {In::normal({9, 10}), In::int64s({5, 7}), In::int64s({1, 2, 3, 1})},
               .attributes = {{"mode", std::string(mode)}}});
  }
}

}  // namespace ortrain::testing
