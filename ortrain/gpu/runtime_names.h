// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Host calls that CUDA and HIP spell alike but for the prefix: ORTRAIN_GPU(MemcpyAsync).

#include "ortrain/gpu/device_code.h"

#if defined(__HIPCC__)
#define ORTRAIN_GPU(name) hip##name
#define ORTRAIN_GPU_PLATFORM "hip"
#define ORTRAIN_GPU_ATTRIBUTE_TYPE hipDeviceAttribute_t
#define ORTRAIN_GPU_ATTRIBUTE_MULTIPROCESSORS hipDeviceAttributeMultiprocessorCount
#define hipErrorMemoryAllocation hipErrorOutOfMemory
#define hipHostAlloc hipHostMalloc
#define hipHostAllocMapped hipHostMallocMapped
#else
#define ORTRAIN_GPU(name) cuda##name
#define ORTRAIN_GPU_PLATFORM "cuda"
#define ORTRAIN_GPU_ATTRIBUTE_TYPE cudaDeviceAttr
#define ORTRAIN_GPU_ATTRIBUTE_MULTIPROCESSORS cudaDevAttrMultiProcessorCount
#endif
