// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_softmax(CaseRegistry& cases) {
  const std::vector<std::tuple<std::string, Dims, int64_t>> shapes = {
      {"scalar", {}, -1},
      {"one", {1}, 0},
      {"row_7", {7}, -1},
      {"rows_8", {3, 8}, -1},
      {"rows_9", {3, 9}, 1},
      {"rows_17", {2, 3, 17}, -1},
      {"axis_0", {9, 5}, 0},
      {"axis_1", {2, 7, 3}, 1},
      {"axis_minus_2", {2, 7, 300}, -2},
      {"empty_rows", {0, 5}, -1},
      {"empty_axis", {3, 0}, -1},
      {"wide", {4, 1000}, -1},
      {"rows_264", {9, 264}, -1},
      {"rows_1027", {2, 1027}, -1},
      {"rows_17000", {2, 17000}, -1},
      {"axis_1_tiles", {3, 40, 70}, 1}};
  for (const auto& [name, dims, axis] : shapes) {
    const bool small = num_elements(dims) < 150;
    for (const std::string op : {"Softmax", "LogSoftmax"}) {
      cases.add({.op = op,
                 .name = name,
                 .inputs = {CaseInput::normal(dims)},
                 .attributes = {{"axis", axis}},
                 .check_gradient = small});
      cases.add(
          {.op = "ortrain::" + op + "Grad",
           .name = name,
           .inputs = {CaseInput::normal(dims), op == "Softmax" ? CaseInput::uniform(dims, 0, 1)
                                                               : CaseInput::uniform(dims, -5, 0)},
           .attributes = {{"axis", axis}},
           .check_gradient = small,
           // Sums of a thousand unnormalized terms.
           .tolerance = small ? 2e-5 : 2e-4});
    }
  }
  for (const std::string op : {"Softmax", "LogSoftmax"}) {
    cases.add({.op = op,
               .name = "large_values",
               .inputs = {CaseInput::uniform({5, 33}, -1e4, 1e4)},
               .check_gradient = false});
    cases.add({.op = op,
               .name = "refuses_axis",
               .inputs = {CaseInput::normal({2, 3})},
               .attributes = {{"axis", int64_t{2}}},
               .refusal = "axis"});
  }
  cases.add({.op = "ortrain::SoftmaxGrad",
             .name = "refuses_ranks",
             .inputs = {CaseInput::normal({2, 3}), CaseInput::normal({3})},
             .refusal = "'y' has the shape"});
}

}  // namespace ortrain::testing
