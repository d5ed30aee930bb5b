// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ortrain {

// One environment variable that the engine reads. All of them stand in flags.cpp.
struct Flag {
  std::string_view name;           // "ORTRAIN_LOG"
  std::string_view default_value;
  std::string_view help;
};

std::span<const Flag> all_flags();
// Current value (the environment is read at each call); throws InternalError for an unknown name.
std::string flag(std::string_view name);
// "1", "true", "on", "yes" in any case.
bool flag_is_on(std::string_view name);

}  // namespace ortrain
