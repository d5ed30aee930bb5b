// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_one_hot(CaseRegistry& cases);
void register_one_hot(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const char* name, DType index_type, Dims dims, int64_t depth,
                            int64_t axis) {
    cases.add({.op = "OneHot",
               .name = name,
               .inputs = {In::integers(index_type, std::move(dims), 0, depth + 2),
                          In::literal(DType::i64, {}, {static_cast<double>(depth)}),
                          In::normal({2})},
               .attributes = {{"axis", axis}}});
  };
  add("last", DType::i64, {7}, 9, -1);
  add("first", DType::i64, {3, 4}, 5, 0);
  add("middle", DType::i32, {3, 4}, 5, 1);
  add("scalar", DType::i64, {}, 5, -1);
  add("empty", DType::i64, {0}, 5, -1);
  add("zero_depth", DType::i64, {3}, 0, -1);
  add("float_indices", DType::f32, {6}, 4, -1);
  add("unsigned_indices", DType::u8, {6}, 4, -1);
  cases.add({.op = "OneHot",
             .name = "negative_and_outside",
             .inputs = {In::int64s({-1, -5, -6, 4, 5, 0}), In::int64s({5}),
                        In::literal(DType::undefined, {2}, {0, 1})}});
  cases.add({.op = "OneHot",
             .name = "three_values",
             .inputs = {In::int64s({1}), In::int64s({5}), In::normal({3})},
             .refusal = "extents 3 and 2"});
}

}  // namespace ortrain::testing
