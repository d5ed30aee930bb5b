// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/onednn.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/base/flags.h"
#include "ortrain/base/loaded_file.h"
#include "ortrain/base/log.h"

namespace ortrain::cpu {
namespace {

struct Plugin {
  const OrtrainOnednnApi* api = nullptr;
  std::string missing_reason;
};

Plugin load() {
  const std::string wanted = flag("ORTRAIN_BLAS");
  if (wanted == "none") return {nullptr, "ORTRAIN_BLAS=none"};
  const bool is_path = wanted.find('/') != std::string::npos;
  if (!is_path && wanted != "auto" && wanted != "onednn" && !wanted.empty()) {
    return {nullptr, str("ORTRAIN_BLAS is '", wanted, "', not auto, onednn, none or a path")};
  }
  if (is_path && !wanted.starts_with('/')) {
    return {nullptr, str("ORTRAIN_BLAS is '", wanted, "', a path has to be absolute")};
  }

  constexpr char kName[] = "libortrain_onednn.so";
  void* library = nullptr;
  std::string reason;
  // Beside this library first; then by name, which searches its RUNPATH. Never in the current
  // folder.
  const std::string own = folder_of_loaded_file(reinterpret_cast<const void*>(&load));
  std::vector<std::string> paths{wanted};
  if (!is_path) paths = {kName};
  if (!is_path && !own.empty()) paths.insert(paths.begin(), own + kName);
  for (const std::string& path : paths) {
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
    const char* error = dlerror();
    reason = error == nullptr ? "not found" : error;
  }
  if (library == nullptr) return {nullptr, reason};

  auto entry = reinterpret_cast<OrtrainOnednnEntry>(dlsym(library, kOrtrainOnednnEntry));
  if (entry == nullptr) return {nullptr, str(kName, " has no ", kOrtrainOnednnEntry)};
  const OrtrainOnednnApi* api = entry();
  if (api == nullptr || api->abi != kOrtrainOnednnAbi) {
    return {nullptr, str(kName, " is of another version of ortrain")};
  }
  return {api, ""};
}

// oneDNN allocates megabytes for packed operands in many calls. glibc gives such memory back to the
// system, and takes it anew page by page, until it has seen a block of that size freed once: here
// it does, a block of the largest size that it learns from. Nobody touches it, so it costs nothing,
// and thresholds that the user has set stay.
void let_malloc_keep_large_blocks() {
  constexpr size_t kLargestLearnt = (size_t{32} << 20) - (size_t{64} << 10);
  void* volatile block = std::malloc(kLargestLearnt);
  std::free(block);
}

const Plugin& plugin() {
  static const Plugin loaded = [] {
    Plugin found = load();
    if (found.api != nullptr) let_malloc_keep_large_blocks();
    log_line("dispatch", found.api != nullptr ? str("oneDNN ", found.api->version)
                                              : str("no oneDNN: ", found.missing_reason));
    return found;
  }();
  return loaded;
}

}  // namespace

const OrtrainOnednnApi* onednn() { return plugin().api; }

const std::string& onednn_missing_reason() { return plugin().missing_reason; }

void check_onednn(int status, const char* what) {
  if (status != 0) throw InternalError(str("oneDNN ", what, ": ", onednn()->last_error()));
}

std::shared_ptr<OnednnConv> OnednnConv::make(const OrtrainOnednnConv& conv, std::string* why) {
  if (onednn() == nullptr) {
    *why = onednn_missing_reason();
    return nullptr;
  }
  void* handle = nullptr;
  if (onednn()->conv_create(&conv, &handle) != 0) {
    *why = onednn()->last_error();
    return nullptr;
  }
  return std::shared_ptr<OnednnConv>(new OnednnConv(handle));
}

OnednnConv::~OnednnConv() { onednn()->conv_destroy(handle_); }

void OnednnConv::run(const float* const* in, float* const* out) const {
  check_onednn(onednn()->conv_run(handle_, in, out), "convolution");
}

}  // namespace ortrain::cpu
