// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/cublaslt.h"

#include <dlfcn.h>

#include <filesystem>
#include <optional>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/base/log.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/library_folders.h"

namespace ortrain::gpu {
namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

struct Search {
  std::mutex mutex;
  std::string path;
  bool done = false;
  std::shared_ptr<Cublaslt> found;
  std::string why;
};

Search& search() {
  static auto* const one = new Search();
  return *one;
}

std::vector<std::string> files_of(const std::string& path) {
  if (path.empty()) return {};
  if (!std::filesystem::is_directory(path)) return {path};
  std::vector<std::string> files;
  for (const char* name : kNames) {
    const std::string file = (std::filesystem::path(path) / name).string();
    if (std::filesystem::exists(file)) files.push_back(file);
  }
  return files;
}

std::shared_ptr<Cublaslt> look(const std::string& path, std::string& why) {
  why = "no libcublasLt.so.13 or .12 is found";
  for (const std::string& file : files_of(path)) {
    if (void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      if (auto found = Cublaslt::open(library, file, why)) return found;
    } else if (const char* error = dlerror()) {
      why = error;
    }
  }
  if (platform() != "cuda") return nullptr;
  for (const char* name : kNames) {
    // Either version, if it is PyTorch's, goes before what the system has.
    void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library == nullptr) {
      static_cast<void>(dlerror());
    } else if (auto found = Cublaslt::open(library, name, why)) {
      return found;
    }
  }
  for (const char* name : kNames) {
    if (void* const library = open_library(name, why)) {
      if (auto found = Cublaslt::open(library, name, why)) return found;
    }
  }
  return nullptr;
}

}  // namespace

std::shared_ptr<Cublaslt> Cublaslt::open(void* library, const std::string& name, std::string& why) {
  auto result = std::make_shared<Cublaslt>();
  std::string missing;
  const auto load = [&](auto& function, const char* symbol) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    if (function == nullptr) missing = symbol;
  };
  cublaslt::Functions& f = result->functions_;
  load(f.Create, "cublasLtCreate");
  load(f.GetVersion, "cublasLtGetVersion");
  load(f.GetStatusString, "cublasLtGetStatusString");
  load(f.MatmulDescCreate, "cublasLtMatmulDescCreate");
  load(f.MatmulDescDestroy, "cublasLtMatmulDescDestroy");
  load(f.MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
  load(f.MatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
  load(f.MatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
  load(f.MatrixLayoutSetAttribute, "cublasLtMatrixLayoutSetAttribute");
  load(f.MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
  load(f.MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
  load(f.MatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
  load(f.MatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
  load(f.Matmul, "cublasLtMatmul");
  if (missing.empty()) return result;
  why = str(name, " has no ", missing);
  return nullptr;
}

std::shared_ptr<Cublaslt> Cublaslt::find(std::string& why) {
  Search& s = search();
  const std::lock_guard lock(s.mutex);
  if (!s.done) {
    s.done = true;
    s.found = look(s.path, s.why);
    if (log_enabled("dispatch")) {
      log_line("dispatch",
               s.found ? str("cuBLASLt ", s.found->version()) : "no cuBLASLt: " + s.why);
    }
  }
  why = s.why;
  return s.found;
}

cublaslt::Handle Cublaslt::handle(int device) {
  const std::lock_guard lock(mutex_);
  cublaslt::Handle& handle = handles_[device];
  if (handle == nullptr) {
    const cublaslt::Status status = functions_.Create(&handle);
    if (status != cublaslt::kSuccess) {
      handle = nullptr;
      throw DeviceError("making a handle of cuBLASLt: " + describe(status));
    }
  }
  return handle;
}

std::string Cublaslt::describe(cublaslt::Status status) const {
  return str(functions_.GetStatusString(status), " (", status, ")");
}

void set_cublaslt_path(std::string path) {
  Search& s = search();
  const std::lock_guard lock(s.mutex);
  s.path = std::move(path);
  s.done = false;
  s.found = nullptr;
}

}  // namespace ortrain::gpu
