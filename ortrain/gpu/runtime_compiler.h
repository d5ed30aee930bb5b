// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

namespace ortrain::gpu {

// A kernel that can be put onto a stream of any device of its architecture.
class LoadedKernel {
 public:
  virtual ~LoadedKernel() = default;
  // The kernel has one parameter, a struct whose contents `arguments` points to. Throws
  // DeviceError.
  virtual void launch(unsigned blocks, unsigned threads, void* stream,
                      const void* arguments) const = 0;
};

// What makes kernels of source text: NVRTC, hipRTC, or the simulator's C++ compiler.
struct SourceCompiler {
  // Version of the compiler, architecture and options: with the source all that the code depends
  // on.
  std::string identity;
  // Code for load. Throws InternalError with the compiler's words.
  std::function<std::string(const std::string& source)> compile;
  // Throws DeviceError, InternalError when the code has no such kernel.
  std::function<std::shared_ptr<const LoadedKernel>(const std::string& code,
                                                    const std::string& entry)>
      load;
};

// The compiler for a device; null with a reason where there is none, or ORTRAIN_GPU_COMPILER says
// so.
const SourceCompiler* source_compiler(int device, std::string* why_not);

struct CompiledKernel {
  std::shared_ptr<const LoadedKernel> kernel;
  // For the log, by whoever waits: a sink may need a lock that the waiting thread holds.
  std::vector<std::string> notes;
};

// A kernel that is being compiled. get() waits for it, and throws what compiling or loading threw.
using KernelJob = std::shared_future<CompiledKernel>;

// Starts to compile in another thread, or to read from the disk (kernel_cache.h). The same source
// for the same compiler is compiled once in a process. Thread-safe; `compiler` lives as long as the
// process.
KernelJob compile_kernel(const SourceCompiler& compiler, const std::string& source,
                         const std::string& entry);
// How many were started in this process.
size_t num_kernel_jobs();

}  // namespace ortrain::gpu
