// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "ortrain/ir/tensor_data.h"

namespace ortrain {

// Floats are held as double so that constants keep their digits in float64 graphs; an ONNX file
// holds float32, and further digits in the metadata of the node.
using Attribute = std::variant<int64_t, double, std::string, std::vector<int64_t>,
                               std::vector<double>, std::vector<std::string>, TensorData>;
using Attributes = std::map<std::string, Attribute>;

// "int", "float", "string", "ints", "floats", "strings", "tensor"
std::string_view attribute_kind(const Attribute& attribute);
// Floats are equal when their bits are: a NaN equals itself, and -0 is not 0.
bool operator_equal(const Attribute& a, const Attribute& b);
bool operator_equal(const Attributes& a, const Attributes& b);

}  // namespace ortrain
