// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace ortrain {

// Loads a shared library that was written against extension.h, and adds its operators and their
// CPU kernels to the registries. Returns the names of its operators ("mylib::Square"); a library
// that is loaded already is not asked again. All of its operators are added, or none.
// Throws FileError when the file cannot be loaded, InvalidModelError when it is no library of
// operators, is of another version, or defines an operator wrongly or a second time.
std::vector<std::string> load_extension(const std::string& path);

}  // namespace ortrain
