// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace ortrain::gpu {

// Folders with the libraries of a device's vendor that come with PyTorch: its wheels bring NVIDIA's
// along, and load some of them alone. Absolute paths; for libraries that are looked for afterwards.
void set_library_folders(std::vector<std::string> folders);

// Opens a library by its name, "libnvrtc.so.13": one that the process has loaded already, one in
// the folders, one that the system knows. Null, with the reasons in `why`, where there is none.
void* open_library(const std::string& name, std::string& why);

}  // namespace ortrain::gpu
