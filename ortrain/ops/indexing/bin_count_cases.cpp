// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_bin_count(CaseRegistry& cases);
void register_bin_count(CaseRegistry& cases) {
  using In = CaseInput;
  const auto add = [&cases](const char* name, In x, int64_t bins, double low, double high,
                            std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = "ortrain::BinCount",
               .name = name,
               .inputs = {std::move(x)},
               .attributes = {{"bins", bins}, {"min", low}, {"max", high}},
               .refusal = std::move(refusal)});
  };
  add("given_range", In::normal({9, 17}), 8, -1, 1);
  add("range_of_data", In::normal({200}), 7, 0, 0);
  add("one_bin", In::normal({17}), 1, -0.5, 0.5);
  add("one_value", In::literal(DType::undefined, {3}, {2, 2, 2}), 4, 0, 0);
  add("closed_at_the_end", In::literal(DType::undefined, {4}, {0, 1, 2, 4}), 4, 0, 4);
  add("empty", In::normal({0}), 5, 0, 0);
  add("nan_is_skipped", In::literal(DType::undefined, {3}, {0.5, std::nan(""), 2}), 4, 0, 4);
  add("no_finite_range", In::literal(DType::undefined, {2}, {0.5, INFINITY}), 4, 0, 0,
      "is not finite");
  add("no_bins", In::normal({3}), 0, 0, 1, "bins must be positive");
  add("backwards", In::normal({3}), 2, 1, 0, "is empty");
}

}  // namespace ortrain::testing
