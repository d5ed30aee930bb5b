// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/target.h"

#include "ortrain/cpu/gemm.h"
// clang-format off: the list of targets comes before any Highway header.
#include "ortrain/cpu/simd/targets.h"
#include "hwy/highway.h"
#include "hwy/targets.h"
// clang-format on

namespace ortrain::cpu {

std::string_view simd_target_name() {
  const int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
  // Better targets have lower bits.
  const int64_t best = usable & -usable;
  return hwy::TargetName(best);
}

std::string_view gemm_backend_name() {
  const auto is_library = [](Storage storage) {
    return gemm_backend_for(storage, 1024, 1024, 1024) == GemmBackend::kOnednn;
  };
  if (!is_library(Storage::kF32)) return "own";
  return is_library(Storage::kBF16) ? "onednn, also in bf16" : "onednn";
}

}  // namespace ortrain::cpu
