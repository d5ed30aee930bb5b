// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>

namespace ortrain::python {

// A function of the running Python that is outside of the limited API; null where this one has
// none.
template <typename Function>
Function python_function(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace ortrain::python
