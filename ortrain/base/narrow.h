// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <utility>

#include "ortrain/base/error.h"

namespace ortrain {

template <std::integral To>
constexpr bool fits(int64_t number) {
  return std::in_range<To>(number);
}

// An extent in fewer bits, for libraries and kernels that count in them. Throws UnsupportedError
// where it does not fit.
template <std::integral To>
To narrow_checked(int64_t number) {
  if (!fits<To>(number)) {
    throw UnsupportedError(str(number, " where numbers have ", 8 * sizeof(To), " bits"));
  }
  return static_cast<To>(number);
}

}  // namespace ortrain
