// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "ortrain/gpu/cublaslt_abi.h"

namespace ortrain::gpu {

// cuBLASLt of this process. Looked for when the first product is planned: the file or folder of
// `set_cublaslt_path`; libcublasLt.so.13 and .12 as library_folders.h finds them.
// Builds that are not for CUDA look at the path alone.
class Cublaslt {
 public:
  // Null, with the reason in `why`, where there is none.
  static std::shared_ptr<Cublaslt> find(std::string& why);

  const cublaslt::Functions& functions() const { return functions_; }
  size_t version() const { return functions_.GetVersion(); }
  // That of the calling thread's current device, which must be `device`; made at its first use.
  // Throws DeviceError.
  cublaslt::Handle handle(int device);
  std::string describe(cublaslt::Status status) const;

  // Use `find`. Null, with the reason in `why`, unless the library has all the functions.
  static std::shared_ptr<Cublaslt> open(void* library, const std::string& name, std::string& why);

 private:
  cublaslt::Functions functions_ = {};
  std::mutex mutex_;
  std::map<int, cublaslt::Handle> handles_;  // never given back: drivers may be gone at exit
};

// A file, or a folder with one: nvidia/cu13/lib beside PyTorch. Empty: none. For plans made later.
void set_cublaslt_path(std::string path);

}  // namespace ortrain::gpu
