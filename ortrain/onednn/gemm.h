// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/cpu/onednn_abi.h"

namespace ortrain::onednn {

// Throws dnnl::error.
void run_gemm(const OrtrainOnednnGemm& gemm);

}  // namespace ortrain::onednn
