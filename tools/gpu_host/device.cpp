// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <execinfo.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

#include "stand_in.h"

// An H100 that is not there: what is asked of a device, errors, the report.

namespace stand_in {
namespace {

std::map<std::string, int64_t>& counts() {
  static auto* const all = new std::map<std::string, int64_t>();
  return *all;
}

std::string quoted(const std::string& text) {
  std::string made = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') made += '\\';
    made += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return made + '"';
}

void write_line(const std::string& line) {
  static std::FILE* const file = [] {
    const char* name = std::getenv("ORTRAIN_STAND_IN_REPORT");
    std::FILE* opened = name == nullptr ? nullptr : std::fopen(name, "a");
    return opened == nullptr ? stderr : opened;
  }();
  std::fputs((line + "\n").c_str(), file);
  std::fflush(file);
}

// Callers outside of this library, as file+offset for addr2line.
std::string callers() {
  void* frames[24];
  const int found = backtrace(frames, 24);
  Dl_info own = {};
  dladdr(reinterpret_cast<void*>(&write_line), &own);
  std::string made;
  int kept = 0;
  for (int i = 0; i < found && kept < 8; ++i) {
    Dl_info info = {};
    if (dladdr(frames[i], &info) == 0 || info.dli_fbase == own.dli_fbase) continue;
    const char* name = std::strrchr(info.dli_fname, '/');
    char text[256];
    std::snprintf(text, sizeof text, "%s%s+%#lx", kept > 0 ? " " : "",
                  name == nullptr ? info.dli_fname : name + 1,
                  static_cast<unsigned long>(static_cast<char*>(frames[i]) -
                                             static_cast<char*>(info.dli_fbase)));
    made += text;
    ++kept;
  }
  return made;
}

struct LastLine {
  ~LastLine() {
    const std::lock_guard lock(state_mutex());
    count_alive();
    std::string line = "{\"counts\": {";
    for (const auto& [what, times] : counts()) {
      if (line.back() != '{') line += ", ";
      line += quoted(what) + ": " + std::to_string(times);
    }
    write_line(line + "}, \"bytes in use\": " + std::to_string(bytes_in_use()) + "}");
  }
} last_line;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_thread = 0;

}  // namespace

std::recursive_mutex& state_mutex() {
  static auto* const mutex = new std::recursive_mutex();
  return *mutex;
}

void count(const std::string& what, int64_t by) {
  const std::lock_guard lock(state_mutex());
  counts()[what] += by;
}

void report(const std::string& rule, const std::string& what) {
  const std::lock_guard lock(state_mutex());
  count("broken rules");
  // One mistake is made in many steps.
  static auto* const told = new std::set<std::string>();
  const std::string where = callers();
  if (told->size() > 200 || !told->insert(rule + where).second) return;
  write_line("{\"rule\": " + quoted(rule) + ", \"what\": " + quoted(what) +
             ", \"where\": " + quoted(where) + "}");
}

cudaError_t result(cudaError_t code, const char* call, bool expected) {
  if (code == cudaSuccess) return code;
  last_error = code;
  if (!expected) report("refused call", std::string(call) + ": " + cudaGetErrorName(code));
  return code;
}

void report_stale_error(const char* call) {
  if (last_error == cudaSuccess) return;
  report("stale error", std::string(call) + " after " + cudaGetErrorName(last_error));
  last_error = cudaSuccess;
}

bool fails_now(const std::string& call) {
  const char* const wanted = std::getenv("ORTRAIN_STAND_IN_FAIL");
  const std::string text = wanted == nullptr ? "" : wanted;
  if (!text.starts_with(call + ":")) return false;
  static int64_t times = 0;
  const std::lock_guard lock(state_mutex());
  return ++times == std::atoll(text.c_str() + call.size() + 1);
}

}  // namespace stand_in

using namespace stand_in;

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t last = last_error;
  last_error = cudaSuccess;
  return last;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDeviceFunction:
      return "cudaErrorInvalidDeviceFunction";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidKernelImage:
      return "cudaErrorInvalidKernelImage";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorIllegalState:
      return "cudaErrorIllegalState";
    case cudaErrorSymbolNotFound:
      return "cudaErrorSymbolNotFound";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated:
      return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureMerge:
      return "cudaErrorStreamCaptureMerge";
    case cudaErrorStreamCaptureUnmatched:
      return "cudaErrorStreamCaptureUnmatched";
    case cudaErrorStreamCaptureUnjoined:
      return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureIsolation:
      return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureImplicit:
      return "cudaErrorStreamCaptureImplicit";
    case cudaErrorCapturedEvent:
      return "cudaErrorCapturedEvent";
    case cudaErrorStreamCaptureWrongThread:
      return "cudaErrorStreamCaptureWrongThread";
    default:
      return "another error";
  }
}
const char* cudaGetErrorString(cudaError_t code) { return cudaGetErrorName(code); }

cudaError_t cudaGetDeviceCount(int* devices) {
  *devices = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device != 0) return result(cudaErrorInvalidDevice, "cudaSetDevice");
  device_of_thread = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 << 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 48 << 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 228 << 10;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrL2CacheSize:
      *value = 50 << 20;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* given, int device) {
  if (device != 0) return result(cudaErrorInvalidDevice, "cudaGetDeviceProperties");
  std::memset(given, 0, sizeof *given);
  std::snprintf(given->name, sizeof given->name, "a device that is not there");
  given->totalGlobalMem = size_t{80} << 30;
  given->sharedMemPerBlock = 48 << 10;
  given->sharedMemPerBlockOptin = 227 << 10;
  given->sharedMemPerMultiprocessor = 228 << 10;
  given->regsPerBlock = given->regsPerMultiprocessor = 65536;
  given->warpSize = 32;
  given->maxThreadsPerBlock = given->maxThreadsDim[0] = given->maxThreadsDim[1] = 1024;
  given->maxThreadsDim[2] = 64;
  given->maxGridSize[0] = 2147483647;
  given->maxGridSize[1] = given->maxGridSize[2] = 65535;
  given->maxThreadsPerMultiProcessor = 2048;
  given->maxBlocksPerMultiProcessor = 32;
  given->multiProcessorCount = 132;
  given->l2CacheSize = 50 << 20;
  given->major = 9;
  given->unifiedAddressing = given->managedMemory = given->canMapHostMemory = 1;
  given->memoryBusWidth = 5120;
  given->textureAlignment = 512;
  return cudaSuccess;
}

// For libraries that stand in for others beside this one.
int ortrain_stand_in_library_work(void* stream, const char* name, const void* const* addresses,
                                  const size_t* bytes, int operands) {
  std::vector<std::pair<const void*, size_t>> all;
  for (int i = 0; i < operands; ++i) all.emplace_back(addresses[i], bytes[i]);
  count("calls of libraries");
  return static_cast<int>(submit(static_cast<cudaStream_t>(stream),
                                 {name,
                                  [all = std::move(all)](const std::string& how, bool) {
                                    for (size_t i = 0; i < all.size(); ++i) {
                                      check_range(all[i].first, all[i].second,
                                                  how + ", operand " + std::to_string(i), false);
                                    }
                                  }},
                                 name));
}

}  // extern "C"
