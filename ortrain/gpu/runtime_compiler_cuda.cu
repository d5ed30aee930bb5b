// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/base/flags.h"
#include "ortrain/base/log.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/library_folders.h"
#include "ortrain/gpu/runtime_compiler.h"
#include "ortrain/gpu/runtime_names.h"

namespace ortrain::gpu {
namespace {

#if defined(__HIPCC__)
#define ORTRAIN_RTC "hiprtc"
constexpr const char* kLibraries[] = {"libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5",
                                      "libhiprtc.so", "libamdhip64.so.5"};
#else
#define ORTRAIN_RTC "nvrtc"
// Code of a newer compiler than the runtime's may be more than the driver knows.
constexpr const char* kLibraries[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
#endif

// NVRTC and hipRTC have the same functions but for the prefix and those that give the code.
// Declared here, since the library is loaded by name and its header need not be there.
struct RuntimeCompilerLibrary {
  using Program = void*;
  int (*version)(int* major, int* minor) = nullptr;
  const char* (*error_string)(int) = nullptr;
  int (*create)(Program*, const char* source, const char* name, int, const char* const*,
                const char* const*) = nullptr;
  int (*compile)(Program, int count, const char* const* options) = nullptr;
  int (*destroy)(Program*) = nullptr;
  int (*log_size)(Program, size_t*) = nullptr;
  int (*log)(Program, char*) = nullptr;
  // Code of one architecture: a cubin, or what hipRTC makes.
  int (*code_size)(Program, size_t*) = nullptr;
  int (*code)(Program, char*) = nullptr;
  // Assembly that the driver translates, for devices that NVRTC does not know.
  int (*ptx_size)(Program, size_t*) = nullptr;
  int (*ptx)(Program, char*) = nullptr;
  int (*count_architectures)(int*) = nullptr;
  int (*list_architectures)(int*) = nullptr;
  std::string missing;  // why it cannot be used; empty if it can
};

template <class Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

#if !defined(__HIPCC__)
// NVRTC opens a library beside it by name alone, and finds it if it is loaded already.
void load_builtins(void* compile_function, int major, int minor) {
  Dl_info info;
  if (dladdr(compile_function, &info) == 0) return;
  const std::string path = info.dli_fname;
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  dlopen(str(folder, "libnvrtc-builtins.so.", major, ".", minor).c_str(), RTLD_NOW | RTLD_LOCAL);
}
#endif

RuntimeCompilerLibrary load_library(const std::string& wanted) {
  RuntimeCompilerLibrary api;
  void* library = nullptr;
  std::vector<std::string> names(std::begin(kLibraries), std::end(kLibraries));
  if (wanted != "auto") names = {wanted};
  for (const std::string& name : names) {
    std::string error;
    library = open_library(name, error);
    if (library != nullptr && dlsym(library, ORTRAIN_RTC "CompileProgram") != nullptr) break;
    if (api.missing.empty()) {
      api.missing = library == nullptr ? error : name + " has no " ORTRAIN_RTC "CompileProgram";
    }
    library = nullptr;
  }
  if (library == nullptr) return api;
  bool complete = find(library, ORTRAIN_RTC "Version", api.version) &&
                  find(library, ORTRAIN_RTC "GetErrorString", api.error_string) &&
                  find(library, ORTRAIN_RTC "CreateProgram", api.create) &&
                  find(library, ORTRAIN_RTC "CompileProgram", api.compile) &&
                  find(library, ORTRAIN_RTC "DestroyProgram", api.destroy) &&
                  find(library, ORTRAIN_RTC "GetProgramLogSize", api.log_size) &&
                  find(library, ORTRAIN_RTC "GetProgramLog", api.log);
#if defined(__HIPCC__)
  complete = complete && find(library, "hiprtcGetCodeSize", api.code_size) &&
             find(library, "hiprtcGetCode", api.code);
#else
  complete = complete && find(library, "nvrtcGetCUBINSize", api.code_size) &&
             find(library, "nvrtcGetCUBIN", api.code) &&
             find(library, "nvrtcGetPTXSize", api.ptx_size) &&
             find(library, "nvrtcGetPTX", api.ptx) &&
             find(library, "nvrtcGetNumSupportedArchs", api.count_architectures) &&
             find(library, "nvrtcGetSupportedArchs", api.list_architectures);
#endif
  api.missing = complete ? "" : "the library of " ORTRAIN_RTC " lacks functions";
#if !defined(__HIPCC__)
  int major = 0;
  int minor = 0;
  if (complete && api.version(&major, &minor) == 0) {
    load_builtins(reinterpret_cast<void*>(api.compile), major, minor);
  }
#endif
  return api;
}

// By the value of the flag, so that a program that changes it gets what it asks for.
const RuntimeCompilerLibrary& library_of(const std::string& wanted) {
  static std::mutex mutex;
  static auto* const loaded = new std::map<std::string, const RuntimeCompilerLibrary*>();
  const std::lock_guard lock(mutex);
  const RuntimeCompilerLibrary*& library = (*loaded)[wanted];
  if (library == nullptr) {
    library = new RuntimeCompilerLibrary(load_library(wanted));
    if (!library->missing.empty()) {
      log_line("dispatch", str("fused nodes are interpreted: ", library->missing));
    }
  }
  return *library;
}

void require(const RuntimeCompilerLibrary& api, int code, const char* what) {
  if (code != 0) throw InternalError(str(what, ": ", api.error_string(code)));
}

// What to compile for on one device.
struct Target {
  std::string architecture;  // "sm_90", "compute_90", "gfx90a"
  bool ptx = false;
};

Target target_of(const RuntimeCompilerLibrary& api, int device) {
#if defined(__HIPCC__)
  (void)api;
  hipDeviceProp_t properties;
  check_device_call(static_cast<int>(hipGetDeviceProperties(&properties, device)),
                    "asking about the device");
  return {properties.gcnArchName, false};
#else
  const int capability = compute_capability(device);
  int count = 0;
  require(api, api.count_architectures(&count), "asking NVRTC for architectures");
  std::vector<int> known(static_cast<size_t>(count));
  require(api, api.list_architectures(known.data()), "asking NVRTC for architectures");
  int best = 0;
  for (const int architecture : known) {
    if (architecture <= capability) best = std::max(best, architecture);
  }
  if (best == 0) throw InternalError(str("NVRTC knows no architecture up to ", capability));
  // The driver translates what was made for an older device.
  if (best != capability) return {str("compute_", best), true};
  return {str("sm_", best), false};
#endif
}

// Products and sums are not contracted: what a kernel of the backward computes again has the bits of
// the forward's kernel, whatever stands around it.
std::vector<std::string> options_of(const Target& target) {
#if defined(__HIPCC__)
  return {"--offload-arch=" + target.architecture, "-std=c++17", "-O3", "-ffp-contract=off"};
#else
  return {"--gpu-architecture=" + target.architecture, "-std=c++17", "-default-device",
          "--fmad=false"};
#endif
}

std::string compile_source(const RuntimeCompilerLibrary& api, const Target& target,
                           const std::string& source) {
  RuntimeCompilerLibrary::Program program = nullptr;
  require(api, api.create(&program, source.c_str(), "ortrain_expr.cu", 0, nullptr, nullptr),
          "preparing a kernel");
  const std::shared_ptr<void> owner(program, [&api](void* handle) {
    RuntimeCompilerLibrary::Program last = handle;
    static_cast<void>(api.destroy(&last));
  });
  const std::vector<std::string> options = options_of(target);
  std::vector<const char*> words;
  for (const std::string& option : options) words.push_back(option.c_str());
  const int result = api.compile(program, static_cast<int>(words.size()), words.data());
  if (result != 0) {
    size_t size = 0;
    std::string log;
    if (api.log_size(program, &size) == 0 && size > 0) {
      log.resize(size);
      static_cast<void>(api.log(program, log.data()));
    }
    throw InternalError(str("compiling a kernel: ", api.error_string(result), "\n", log));
  }
  size_t size = 0;
  require(api, (target.ptx ? api.ptx_size : api.code_size)(program, &size), "taking a kernel");
  std::string code(size, '\0');
  require(api, (target.ptx ? api.ptx : api.code)(program, code.data()), "taking a kernel");
  return code;
}

#if defined(__HIPCC__)

// HIP loads code for one device at a time.
class DeviceKernel final : public LoadedKernel {
 public:
  DeviceKernel(std::string code, std::string entry)
      : code_(std::move(code)), entry_(std::move(entry)) {}

  void launch(unsigned blocks, unsigned threads, void* stream,
              const void* arguments) const override {
    if (blocks == 0) return;
    void* values[] = {const_cast<void*>(arguments)};
    check_device_call(
        static_cast<int>(hipModuleLaunchKernel(function(), blocks, 1, 1, threads, 1, 1, 0,
                                               static_cast<hipStream_t>(stream), values, nullptr)),
        "launching a generated kernel");
  }

 private:
  hipFunction_t function() const {
    int device = 0;
    check_device_call(static_cast<int>(hipGetDevice(&device)), "asking for the current device");
    const std::lock_guard lock(mutex_);
    hipFunction_t& found = functions_[device];
    if (found == nullptr) {
      hipModule_t module = nullptr;  // stays as long as the process
      check_device_call(static_cast<int>(hipModuleLoadData(&module, code_.data())),
                        "loading a generated kernel");
      check_device_call(static_cast<int>(hipModuleGetFunction(&found, module, entry_.c_str())),
                        "loading a generated kernel");
    }
    return found;
  }

  std::string code_;
  std::string entry_;
  mutable std::mutex mutex_;
  mutable std::map<int, hipFunction_t> functions_;
};

std::shared_ptr<const LoadedKernel> load_code(const std::string& code, const std::string& entry) {
  return std::make_shared<DeviceKernel>(code, entry);
}

#else

// A library of CUDA 12 and later serves all devices.
class DeviceKernel final : public LoadedKernel {
 public:
  DeviceKernel(const std::string& code, const std::string& entry) {
    check_device_call(static_cast<int>(cudaLibraryLoadData(&library_, code.data(), nullptr, nullptr,
                                                           0, nullptr, nullptr, 0)),
                      "loading a generated kernel");
    check_device_call(static_cast<int>(cudaLibraryGetKernel(&kernel_, library_, entry.c_str())),
                      "loading a generated kernel");
  }
  // The library stays as long as the process, since kernels of it may be in a queue.

  void launch(unsigned blocks, unsigned threads, void* stream,
              const void* arguments) const override {
    if (blocks == 0) return;
    void* values[] = {const_cast<void*>(arguments)};
    check_device_call(static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(kernel_),
                                                        dim3(blocks), dim3(threads), values, 0,
                                                        static_cast<cudaStream_t>(stream))),
                      "launching a generated kernel");
  }

 private:
  cudaLibrary_t library_ = nullptr;
  cudaKernel_t kernel_ = nullptr;
};

std::shared_ptr<const LoadedKernel> load_code(const std::string& code, const std::string& entry) {
  return std::make_shared<DeviceKernel>(code, entry);
}

#endif

}  // namespace

const SourceCompiler* source_compiler(int device, std::string* why_not) {
  const std::string wanted = flag("ORTRAIN_GPU_COMPILER");
  if (wanted != "auto" && wanted.find('/') == std::string::npos) {
    *why_not = str("ORTRAIN_GPU_COMPILER is '", wanted, "'");
    return nullptr;
  }
  const RuntimeCompilerLibrary& api = library_of(wanted);
  if (!api.missing.empty()) {
    *why_not = api.missing;
    return nullptr;
  }
  static std::mutex mutex;
  // Kept as long as the process; by address, since clang 15 fails on maps of such values for HIP.
  static auto* const compilers = new std::map<std::string, const SourceCompiler*>();
  const std::lock_guard lock(mutex);
  const SourceCompiler*& made = (*compilers)[str(wanted, " ", device)];
  if (made == nullptr) {
    const Target target = target_of(api, device);
    int major = 0;
    int minor = 0;
    require(api, api.version(&major, &minor), "asking for the compiler's version");
    SourceCompiler compiler;
    compiler.identity = str(ORTRAIN_RTC " ", major, ".", minor);
    for (const std::string& option : options_of(target)) compiler.identity += " " + option;
    compiler.compile = [&api, target](const std::string& source) {
      return compile_source(api, target, source);
    };
    compiler.load = load_code;
    made = new SourceCompiler(std::move(compiler));
  }
  return made;
}

}  // namespace ortrain::gpu
