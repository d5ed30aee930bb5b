// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_shape(CaseRegistry& cases);
void register_shape(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const char* name, Dims dims, Attributes attributes) {
    cases.add({.op = "Shape",
               .name = name,
               .inputs = {In::normal(std::move(dims))},
               .attributes = std::move(attributes),
               .types = kAllTypes});
  };
  add("all", {2, 3, 17}, {});
  add("scalar", {}, {});
  add("empty_extent", {4, 0, 1}, {});
  add("start", {2, 3, 4}, {{"start", int64_t{1}}});
  add("negative_end", {2, 3, 4}, {{"end", int64_t{-1}}});
  add("clamped", {2, 3, 4}, {{"start", int64_t{-9}}, {"end", int64_t{9}}});
  add("reversed_bounds", {2, 3, 4}, {{"start", int64_t{2}}, {"end", int64_t{1}}});
  cases.add({.op = "Size", .name = "matrix", .inputs = {In::normal({7, 9})}, .types = kAllTypes});
  cases.add({.op = "Size", .name = "scalar", .inputs = {In::normal({})}});
  cases.add({.op = "Size", .name = "empty", .inputs = {In::normal({3, 0})}});
}

}  // namespace ortrain::testing
