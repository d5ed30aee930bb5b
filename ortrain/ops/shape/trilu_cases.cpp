// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_trilu(CaseRegistry& cases);
void register_trilu(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const char* name, Dims dims, std::optional<int64_t> k, int64_t upper) {
    const In diagonal =
        k ? In::literal(DType::i64, {}, {static_cast<double>(*k)}) : In::none();
    cases.add({.op = "Trilu",
               .name = name,
               .inputs = {In::normal(std::move(dims)), diagonal},
               .attributes = {{"upper", upper}}});
  };
  add("upper", {5, 5}, std::nullopt, 1);
  add("lower", {5, 5}, std::nullopt, 0);
  add("upper_k", {2, 4, 7}, 2, 1);
  add("lower_k", {2, 7, 4}, -2, 0);
  add("upper_far", {3, 4}, 100, 1);
  add("lower_far", {3, 4}, -100, 0);
  add("keeps_all", {3, 4}, -100, 1);
  add("empty", {0, 4}, 1, 1);
  cases.add({.op = "Trilu",
             .name = "types",
             .inputs = {In::integers(DType::undefined, {9, 17}, 0, 2)},
             .types = kAllTypes,
             .check_gradient = false});
  cases.add({.op = "Trilu",
             .name = "rank_1",
             .inputs = {In::normal({4})},
             .refusal = "two axes at least"});
}

}  // namespace ortrain::testing
