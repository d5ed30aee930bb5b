// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Linked into the extension module with --wrap=dlopen: beside PyTorch, whose own cuBLASLt is loaded
// and wants a driver, the engine finds the one that stands in for it.

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

extern "C" {
void* __real_dlopen(const char* name, int flags);

void* __wrap_dlopen(const char* name, int flags) {
  const char* const stand_in = std::getenv("ORTRAIN_STAND_IN_CUBLASLT");
  if (stand_in != nullptr && name != nullptr && std::strcmp(name, "libcublasLt.so.13") == 0) {
    return __real_dlopen(stand_in, RTLD_NOW | RTLD_LOCAL);
  }
  return __real_dlopen(name, flags);
}
}
