// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/cpu/onednn_abi.h"

namespace ortrain::onednn {

// The types that oneDNN has more than reference code for here, as bits of OrtrainOnednnType.
uint32_t gemm_types();

// Throws dnnl::error.
void run_gemm(const OrtrainOnednnGemm& gemm);

}  // namespace ortrain::onednn
