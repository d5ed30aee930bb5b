// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "ortrain/cpu/onednn_abi.h"

namespace ortrain::cpu {

// The oneDNN plugin, loaded on first use; null where it is missing, does not fit this version, or
// ORTRAIN_BLAS=none. The environment variable ORTRAIN_BLAS names a backend (auto, onednn, none) or
// the path of a plugin.
const OrtrainOnednnApi* onednn();

// Why `onednn()` is null; empty when it is not.
const std::string& onednn_missing_reason();

// Throws InternalError with the plugin's message unless `status` is 0.
void check_onednn(int status, const char* what);

// A convolution prepared for one shape. Not for use by two threads at once.
class OnednnConv {
 public:
  // Null when the library refuses the shape; the reason goes to *why.
  static std::shared_ptr<OnednnConv> make(const OrtrainOnednnConv& conv, std::string* why);
  ~OnednnConv();
  OnednnConv(const OnednnConv&) = delete;
  OnednnConv& operator=(const OnednnConv&) = delete;

  // Operands as listed at OrtrainOnednnConvKind.
  void run(const float* const* in, float* const* out) const;

 private:
  explicit OnednnConv(void* handle) : handle_(handle) {}
  void* handle_;
};

}  // namespace ortrain::cpu
