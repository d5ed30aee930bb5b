// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_cast_each(CaseRegistry& cases);
void register_cast_each(CaseRegistry& cases) {
  using In = CaseInput;
  for (const auto& [to, type] : {std::pair<int64_t, const char*>{1, "float32"},
                                 {10, "float16"},
                                 {11, "float64"},
                                 {16, "bfloat16"}}) {
    const auto add = [&, to = to, type = type](const char* name, std::vector<Dims> dims) {
      std::vector<CaseInput> inputs;
      for (Dims& d : dims) inputs.push_back(In::normal(std::move(d)));
      const size_t count = inputs.size();
      cases.add({.op = "ortrain::CastEach",
                 .name = std::string(name) + "_to_" + type,
                 .inputs = std::move(inputs),
                 .attributes = {{"to", to}},
                 .outputs = count,
                 .check_gradient = to == 11});
    };
    add("one", {{3, 5}});
    add("odd_sizes", {{7}, {}, {4, 4}, {0, 3}, {1}, {2, 3, 5}});
    add("blocks", {{33, 130}, {5}, {4096}, {4097}});
    if (to == 16) add("many", std::vector<Dims>(100, {3}));
  }
  cases.add({.op = "ortrain::CastEach",
             .name = "refuses_integers",
             .inputs = {In::normal({3})},
             .attributes = {{"to", int64_t{7}}},
             .refusal = "element type 7 in attribute 'to'"});
  cases.add({.op = "ortrain::CastEach",
             .name = "refuses_another_number_of_outputs",
             .inputs = {In::normal({3}), In::normal({3})},
             .attributes = {{"to", int64_t{1}}},
             .outputs = 1,
             .refusal = "2 inputs make as many outputs, not 1"});
}

}  // namespace ortrain::testing
