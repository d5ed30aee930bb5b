// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_range(CaseRegistry& cases);
void register_range(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const char* name, std::vector<double> bounds,
                            std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = "Range",
               .name = name,
               .inputs = {In::literal(DType::undefined, {}, {bounds[0]}),
                          In::literal(DType::undefined, {}, {bounds[1]}),
                          In::literal(DType::undefined, {}, {bounds[2]})},
               .types = kIndexTypes,
               .refusal = std::move(refusal)});
  };
  add("up", {0, 9, 1});
  add("step", {3, 17, 5});
  add("down", {5, -4, -2});
  add("empty", {5, 5, 1});
  add("backwards", {5, 9, -1});
  add("long", {-3, 200, 1});
  add("zero_step", {0, 4, 0}, "delta is zero");
  cases.add({.op = "Range",
             .name = "data_dependent",
             .inputs = {In::literal(DType::f32, {}, {0}), In::literal(DType::f32, {}, {1}),
                        In::literal(DType::f32, {}, {0.25})},
             .refusal = "depends on data"});
}

}  // namespace ortrain::testing
