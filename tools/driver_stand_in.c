// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// In the place of NVIDIA's driver, for tools/check_cudnn_plans.py: cuDNN compiles kernels for
// devices that are not there, but makes no plan with them unless a driver takes the code. This one
// takes all code, and has no device.

enum { kSuccess = 0, kNoDevice = 100 };

#define TAKES(name) \
  int name(void) { return kSuccess; }
#define MAKES(name)       \
  int name(void** made) { \
    *made = (void*)made;  \
    return kSuccess;      \
  }
#define REFUSES(name) \
  int name(void) { return kNoDevice; }

MAKES(cuLibraryLoadData)
MAKES(cuLibraryLoadFromFile)
MAKES(cuLibraryGetKernel)
MAKES(cuModuleLoadData)
MAKES(cuModuleLoadDataEx)
MAKES(cuModuleLoadFatBinary)
MAKES(cuModuleGetFunction)
TAKES(cuLibraryUnload)
TAKES(cuModuleUnload)
TAKES(cuFuncGetAttribute)
TAKES(cuFuncSetAttribute)
TAKES(cuKernelGetAttribute)
TAKES(cuKernelSetAttribute)
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks) {
  *blocks = 1;
  return kSuccess;
}
int cuOccupancyMaxPotentialClusterSize(int* blocks) {
  *blocks = 1;
  return kSuccess;
}

// For PyTorch above tools/gpu_host, whose device has a context.
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  (void)device;
  *flags = 0;
  *is_active = 1;
  return kSuccess;
}

static int give(const char** text) {
  *text = "there is no device";
  return kSuccess;
}
int cuGetErrorName(int error, const char** text) { return (void)error, give(text); }
int cuGetErrorString(int error, const char** text) { return (void)error, give(text); }

REFUSES(cuInit)
REFUSES(cuDriverGetVersion)
REFUSES(cuDeviceGet)
REFUSES(cuDeviceGetAttribute)
REFUSES(cuDeviceGetCount)
REFUSES(cuDevicePrimaryCtxRelease)
REFUSES(cuDevicePrimaryCtxReset)
REFUSES(cuDevicePrimaryCtxRetain)
REFUSES(cuCtxGetCurrent)
REFUSES(cuCtxGetDevice)
REFUSES(cuCtxGetLimit)
REFUSES(cuCtxPopCurrent)
REFUSES(cuCtxPushCurrent)
REFUSES(cuLaunchCooperativeKernel)
REFUSES(cuLaunchKernel)
REFUSES(cuLaunchKernelEx)
REFUSES(cuLinkAddData)
REFUSES(cuLinkAddData_v2)
REFUSES(cuLinkAddFile_v2)
REFUSES(cuLinkComplete)
REFUSES(cuLinkCreate)
REFUSES(cuLinkCreate_v2)
REFUSES(cuLinkDestroy)
REFUSES(cuMemcpyDtoH_v2)
REFUSES(cuModuleGetGlobal_v2)
REFUSES(cuStreamGetCtx)
REFUSES(cuStreamSynchronize)
REFUSES(cuTensorMapEncodeTiled)
