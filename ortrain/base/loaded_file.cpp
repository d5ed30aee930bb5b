// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/loaded_file.h"

#include <cstdint>
#include <fstream>
#include <sstream>

namespace ortrain {

std::string folder_of_loaded_file(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::ifstream maps("/proc/self/maps");
  // begin-end permissions offset device inode path
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    if (!(fields >> std::hex >> begin >> dash >> end) || wanted < begin || wanted >= end) continue;
    const size_t path = line.find('/');
    const size_t slash = line.rfind('/');
    return path == std::string::npos ? "" : line.substr(path, slash + 1 - path);
  }
  return "";
}

}  // namespace ortrain
