// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_transpose(CaseRegistry& cases);
void register_transpose(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const char* name, Dims dims,
                            std::optional<std::vector<int64_t>> perm,
                            std::optional<std::string> refusal = std::nullopt) {
    Attributes attributes;
    if (perm) attributes["perm"] = *perm;
    cases.add({.op = "Transpose",
               .name = name,
               .inputs = {In::normal(std::move(dims))},
               .attributes = attributes,
               .refusal = std::move(refusal)});
  };
  add("reversed", {2, 3, 4}, std::nullopt);
  add("matrix", {17, 33}, {{1, 0}});
  add("tiles", {40, 70}, {{1, 0}});
  add("tall", {70, 3}, {{1, 0}});
  add("batched", {3, 7, 9}, {{0, 2, 1}});
  add("heads", {2, 5, 3, 8}, {{0, 2, 1, 3}});
  add("heads_matrix", {2, 5, 3, 8}, {{0, 2, 3, 1}});
  add("cycle", {4, 5, 6}, {{2, 0, 1}});
  add("identity", {4, 5}, {{0, 1}});
  add("ones_move", {1, 4, 1, 5}, {{1, 0, 3, 2}});
  add("scalar", {}, std::nullopt);
  add("empty", {0, 3}, {{1, 0}});
  add("not_a_permutation", {2, 3}, {{0, 0}}, "is no permutation");
  add("wrong_length", {2, 3}, {{0}}, "is no permutation");
  for (const Dims& dims : {Dims{136, 72}, Dims{131, 67}}) {
    cases.add({.op = "Transpose",
               .name = dims[0] == 136 ? "many_tiles" : "many_tiles_odd",
               .inputs = {In::normal(dims)},
               .check_gradient = false});
  }
  cases.add({.op = "Transpose",
             .name = "matrix_inside",
             .inputs = {In::normal({2, 66, 3, 20})},
             .attributes = {{"perm", std::vector<int64_t>{2, 3, 0, 1}}},
             .check_gradient = false});
  cases.add({.op = "Transpose",
             .name = "types",
             .inputs = {In::integers(DType::undefined, {17, 9}, 0, 2)},
             .attributes = {{"perm", std::vector<int64_t>{1, 0}}},
             .types = kAllTypes,
             .check_gradient = false});
}

}  // namespace ortrain::testing
