// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace ortrain {

// The folder of the file that holds `address` in this process (a library, or the program), with a
// slash at its end; "" where the system does not tell. Absolute, and the same wherever the process
// has gone since: it is what the kernel has mapped, not the path by which somebody asked for it.
std::string folder_of_loaded_file(const void* address);

}  // namespace ortrain
