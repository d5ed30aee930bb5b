// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/library_folders.h"

#include <dlfcn.h>

#include <filesystem>
#include <mutex>

#include "ortrain/base/error.h"

namespace ortrain::gpu {
namespace {

std::mutex mutex;
std::vector<std::string>& folders() {
  static auto* const all = new std::vector<std::string>();
  return *all;
}

}  // namespace

void set_library_folders(std::vector<std::string> given) {
  for (const std::string& folder : given) {
    // A relative one would be looked for in whatever folder the process happens to be in.
    if (!std::filesystem::path(folder).is_absolute()) {
      throw InvalidModelError(str("'", folder, "' is no absolute path"));
    }
  }
  const std::lock_guard lock(mutex);
  folders() = std::move(given);
}

void* open_library(const std::string& name, std::string& why) {
  if (void* loaded = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return loaded;
  static_cast<void>(dlerror());
  std::vector<std::string> places;
  {
    const std::lock_guard lock(mutex);
    places = folders();
  }
  why.clear();
  const auto attempt = [&](const std::string& path) {
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    const char* error = library == nullptr ? dlerror() : nullptr;
    if (error != nullptr) why += (why.empty() ? "" : "; ") + std::string(error);
    return library;
  };
  for (const std::string& place : places) {
    const std::filesystem::path path = std::filesystem::path(place) / name;
    std::error_code unknown;
    if (!std::filesystem::exists(path, unknown)) continue;
    if (void* found = attempt(path.string())) return found;
  }
  return attempt(name);
}

}  // namespace ortrain::gpu
