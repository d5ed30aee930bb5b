// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/optimizer_numbers.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

// [least, end)
struct NumberRange {
  std::string_view name;
  double least;
  double end;
};

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr NumberRange kNumberRanges[] = {
    {"learning_rate", 0, kInfinity},
    {"rate", 0, kInfinity},
    {"beta1", 0, 1},
    {"beta2", 0, 1},
    {"epsilon", 0, kInfinity},
    {"momentum", 0, kInfinity},
    {"weight_decay", 0, kInfinity},
    {"rate_decay", 0, kInfinity},
    {"max_norm", 0, kInfinity},
    {"dampening", std::numeric_limits<double>::lowest(), kInfinity}};

}  // namespace

std::string out_of_range(std::string_view name, double value) {
  const auto* range = std::ranges::find(kNumberRanges, name, &NumberRange::name);
  const auto reason = [&](const std::string& expected) {
    return str("'", name, "' is ", value, ", expected ", expected);
  };
  if (range == std::end(kNumberRanges)) return std::isnan(value) ? reason("a number") : "";
  if (value >= range->least && value < range->end) return "";
  return reason(str("at least ", range->least, " and below ", range->end));
}

}  // namespace ortrain
