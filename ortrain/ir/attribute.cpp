// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/attribute.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>

namespace ortrain {

std::string_view attribute_kind(const Attribute& attribute) {
  static constexpr std::array<std::string_view, 7> kKinds{"int",    "float",   "string", "ints",
                                                          "floats", "strings", "tensor"};
  return kKinds[attribute.index()];
}

namespace {

// A NaN equals itself here, and -0 is not 0.
bool same_float(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

}  // namespace

bool operator_equal(const Attribute& a, const Attribute& b) {
  if (a.index() != b.index()) return false;
  if (const auto* value = std::get_if<double>(&a)) return same_float(*value, std::get<double>(b));
  if (const auto* values = std::get_if<std::vector<double>>(&a)) {
    const auto& others = std::get<std::vector<double>>(b);
    return std::equal(values->begin(), values->end(), others.begin(), others.end(), same_float);
  }
  if (const auto* tensor = std::get_if<TensorData>(&a)) {
    return tensor->equals(std::get<TensorData>(b));
  }
  return std::visit(
      [&](const auto& left) {
        using T = std::decay_t<decltype(left)>;
        if constexpr (std::is_same_v<T, TensorData>) {
          return false;
        } else {
          return left == std::get<T>(b);
        }
      },
      a);
}

bool operator_equal(const Attributes& a, const Attributes& b) {
  if (a.size() != b.size()) return false;
  for (auto left = a.begin(), right = b.begin(); left != a.end(); ++left, ++right) {
    if (left->first != right->first || !operator_equal(left->second, right->second)) return false;
  }
  return true;
}

}  // namespace ortrain
