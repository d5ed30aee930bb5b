// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <string>

#include "oneapi/dnnl/dnnl.hpp"
#include "ortrain/cpu/onednn_abi.h"
#include "ortrain/onednn/conv.h"
#include "ortrain/onednn/gemm.h"
#include "ortrain/onednn/team.h"

namespace ortrain::onednn {
namespace {

thread_local std::string error_text;

// Exceptions end here: only a status crosses the C interface.
template <class Body>
int guarded(Body body) noexcept {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    try {
      error_text = error.what();
    } catch (...) {
      error_text.clear();
    }
  } catch (...) {
    error_text.clear();
  }
  return 1;
}

const char* last_error() { return error_text.c_str(); }

int gemm(const OrtrainOnednnGemm* arguments) {
  return guarded([&] {
    const Team team;
    run_gemm(*arguments);
  });
}

int conv_create(const OrtrainOnednnConv* conv, void** handle) {
  return guarded([&] { *handle = new ConvOfTeams(*conv); });
}

int conv_run(void* handle, const float* const* in, float* const* out) {
  return guarded([&] { static_cast<ConvOfTeams*>(handle)->run(in, out); });
}

void conv_destroy(void* handle) { delete static_cast<ConvOfTeams*>(handle); }

const std::string& version() {
  static const std::string text = [] {
    const dnnl_version_t* v = dnnl_version();
    return std::to_string(v->major) + "." + std::to_string(v->minor) + "." +
           std::to_string(v->patch);
  }();
  return text;
}

// oneDNN keeps 1024 primitives, some 40 KiB each, of all shapes that ever were. Plans and threads
// keep those that they use themselves. A user who asks for another number gets it.
void bound_primitive_cache() {
  constexpr int kDefault = 1024;
  constexpr int kPrimitives = 256;
  int capacity = 0;
  if (dnnl_get_primitive_cache_capacity(&capacity) == dnnl_success && capacity == kDefault) {
    dnnl_set_primitive_cache_capacity(kPrimitives);
  }
}

}  // namespace
}  // namespace ortrain::onednn

extern "C" __attribute__((visibility("default"))) const OrtrainOnednnApi* ortrain_onednn_api() {
  namespace onednn = ortrain::onednn;
  static const bool bounded = (onednn::bound_primitive_cache(), true);
  (void)bounded;
  static const OrtrainOnednnApi api = {
      .abi = kOrtrainOnednnAbi,
      .version = onednn::version().c_str(),
      .last_error = onednn::last_error,
      .gemm = onednn::gemm,
      .gemm_types = onednn::gemm_types(),
      .conv_create = onednn::conv_create,
      .conv_run = onednn::conv_run,
      .conv_destroy = onednn::conv_destroy,
  };
  return &api;
}
