// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace ortrain {

// Why an optimizer's number `name` (an attribute of a step, "learning_rate" or "rate") cannot be
// `value`: "'beta1' is 2, expected at least 0 and below 1"; empty where it can.
std::string out_of_range(std::string_view name, double value);

}  // namespace ortrain
