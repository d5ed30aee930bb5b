// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_check_indices(CaseRegistry& cases);
void register_check_indices(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const char* name, In indices, double extent,
                            std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = "ortrain::CheckIndices",
               .name = name,
               .inputs = {std::move(indices), In::literal(DType::i64, {}, {extent})},
               .refusal = std::move(refusal)});
  };
  for (const DType type : {DType::i32, DType::i64}) {
    const bool wide = type == DType::i64;
    add(wide ? "many" : "many_i32", In::integers(type, {7, 33}, 0, 5), 5);
    add(wide ? "scalar" : "scalar_i32", In::literal(type, {}, {4}), 5);
    add(wide ? "negative" : "negative_i32", In::literal(type, {3}, {0, -1, 1}), 5,
        "index -1 at position 1 is outside of [0, 5)");
  }
  add("empty", In::literal(DType::i64, {0, 3}, {}), 0);
  add("too_large", In::literal(DType::i64, {2, 2}, {0, 1, 2, 5}), 5, "index 5 at position 3 is outside of [0, 5)");
  add("nothing_to_point_to", In::literal(DType::i64, {1}, {0}), 0, "is outside of [0, 0)");
  cases.add({.op = "ortrain::CheckIndices",
             .name = "extent_of_rank_one",
             .inputs = {In::literal(DType::i64, {1}, {0}), In::literal(DType::i64, {1}, {5})},
             .refusal = "'extent' is a scalar, not of shape [1]"});
}

}  // namespace ortrain::testing
