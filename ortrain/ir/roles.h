// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <charconv>
#include <optional>
#include <string_view>
#include <utility>

#include "ortrain/ir/graph.h"

namespace ortrain {

// Names of the roles, in the text form, in files and in Python.
inline constexpr std::array<std::pair<std::string_view, InputRole>, 7> kInputRoles{{
    {"user", InputRole::user},
    {"parameter", InputRole::parameter},
    {"buffer", InputRole::buffer},
    {"seed", InputRole::seed},
    {"gradient", InputRole::gradient},
    {"derived", InputRole::derived},
    {"state", InputRole::state},
}};
inline constexpr std::array<std::pair<std::string_view, OutputRole>, 6> kOutputRoles{{
    {"user", OutputRole::user},
    {"buffer_update", OutputRole::buffer_update},
    {"input_update", OutputRole::input_update},
    {"gradient", OutputRole::gradient},
    {"state_update", OutputRole::state_update},
    {"token", OutputRole::token},
}};

template <class Role, size_t kCount>
constexpr std::string_view name_in(
    const std::array<std::pair<std::string_view, Role>, kCount>& roles, Role role) {
  for (const auto& [name, known] : roles) {
    if (known == role) return name;
  }
  return "";
}

template <class Role, size_t kCount>
constexpr std::optional<Role> role_in(
    const std::array<std::pair<std::string_view, Role>, kCount>& roles, std::string_view name) {
  for (const auto& [known, role] : roles) {
    if (known == name) return role;
  }
  return std::nullopt;
}

constexpr std::string_view name_of(InputRole role) { return name_in(kInputRoles, role); }
constexpr std::string_view name_of(OutputRole role) { return name_in(kOutputRoles, role); }

// What stays from run to run and has a qualified name.
constexpr bool is_kept(InputRole role) {
  return role == InputRole::parameter || role == InputRole::buffer || role == InputRole::state;
}

// The number of a checkpoint, from 1; nullopt for other text.
inline std::optional<int> checkpoint_number(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 1) return std::nullopt;
  return number;
}

}  // namespace ortrain
