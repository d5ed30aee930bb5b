// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

#include "ortrain/base/error.h"

namespace ortrain::fuzz {

// A rule of the engine that does not hold.
class BrokenRule : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

inline void require(bool holds, const std::string& rule) {
  if (!holds) throw BrokenRule(rule);
}

// Runs `body`; false where the engine refuses. What is a mistake of the engine's own leaves.
template <class Body>
bool accepted(const Body& body) {
  try {
    body();
    return true;
  } catch (const InternalError&) {
    throw;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace ortrain::fuzz
