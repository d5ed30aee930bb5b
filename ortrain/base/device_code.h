// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Marks functions that device code calls too, where a compiler for CUDA or HIP reads them.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define ORTRAIN_HOST_DEVICE __host__ __device__
#else
#define ORTRAIN_HOST_DEVICE
#endif
