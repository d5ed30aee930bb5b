// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>

#include "stand_in.h"

// What PyTorch's build for CUDA asks of the runtime beside what the engine does.

using namespace stand_in;

namespace {

// In the place of functions that tools/driver_stand_in.c lacks.
int not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

cudaError_t refuse(const char* call) { return result(cudaErrorNotSupported, call); }

}  // namespace

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* const found_there = driver == nullptr ? nullptr : dlsym(driver, symbol);
  *function = found_there != nullptr ? found_there : reinterpret_cast<void*>(&not_supported);
  if (found != nullptr) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return refuse("cudaDeviceEnablePeerAccess");
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int) {
  std::snprintf(text, static_cast<size_t>(bytes), "0000:00:00.0");
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned) {
  return submit(stream,
                {"a callback",
                 [=](const std::string&, bool performs) {
                   if (performs) function(stream, cudaSuccess, data);
                 }},
                "cudaStreamAddCallback");
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;  // of kernels, which do nothing
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t*, int) {
  return refuse("cudaDeviceGetDefaultMemPool");
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return refuse("cudaMemPoolGetAttribute");
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return refuse("cudaMemPoolSetAttribute");
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return refuse("cudaMemPoolSetAccess");
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return refuse("cudaMemPoolTrimTo"); }
cudaError_t cudaGetSymbolAddress(void**, const void*) { return refuse("cudaGetSymbolAddress"); }
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) {
  return refuse("cudaGraphDebugDotPrint");
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*,
                                         size_t* count) {
  *count = 0;
  return refuse("cudaGraphNodeGetDependencies");
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
  return refuse("cudaIpcGetMemHandle");
}
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) {
  return refuse("cudaIpcOpenMemHandle");
}
cudaError_t cudaIpcCloseMemHandle(void*) { return refuse("cudaIpcCloseMemHandle"); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) {
  return refuse("cudaIpcGetEventHandle");
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) {
  return refuse("cudaIpcOpenEventHandle");
}

}  // extern "C"
