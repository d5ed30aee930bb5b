// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/flags.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

constexpr std::array kFlags{
    Flag{"ORTRAIN_LOG", "",
         "What goes to the log, comma-separated: categories of the engine (dispatch, passes, "
         "memory, "
         "plan, export, or all); from Python, whose lines go to stderr then, also info, debug, "
         "json."},
    Flag{"ORTRAIN_PROGRESS", "auto",
         "Show preparing and training on the terminal: auto (where stderr is one, in the main "
         "process, and rich is installed) or off."},
    Flag{"ORTRAIN_DISABLE_PASSES", "", "Comma-separated names of graph passes to skip."},
    Flag{"ORTRAIN_VERIFY", "0",
         "Verify the graph after every pass, and each plan when it is made."},
    Flag{"ORTRAIN_BLAS", "auto",
         "Matrix products: auto, onednn, none (our own kernels), or the absolute path of the "
         "plugin."},
    Flag{"ORTRAIN_CHECK_NAN", "0",
         "Raise NanError when a result or gradient holds NaN, naming the operator and layer that "
         "made the first one of the step. Read when a graph is made; slow."},
    Flag{"ORTRAIN_PROFILE", "0",
         "Time every node from the start; read the figures with ORTModule.profile()."},
    Flag{"ORTRAIN_CACHE_DIR", "off",
         "Folder of captured graphs, which later processes load: off, a path, or on for "
         "$XDG_CACHE_HOME/ortrain (~/.cache/ortrain). For code that depends on its arguments, its "
         "own state and source files alone."},
    Flag{"ORTRAIN_CACHE_SIZE", "512",
         "MiB that the folder may take; graphs unused for longest go first."},
    Flag{"ORTRAIN_GPU_GRAPHS", "1",
         "Record the steps of plans whose addresses come again (CUDA graphs), and launch them as a "
         "whole."},
    Flag{"ORTRAIN_GPU_SIMULATOR", "0",
         "Run modules on the CPU by the GPU provider's kernels, thread by thread: slow, for tests. "
         "Development builds alone have it."},
    Flag{"ORTRAIN_GPU_COMPILER", "auto",
         "What compiles fused kernels at run time: auto (NVRTC on NVIDIA, hipRTC on AMD), off "
         "(they are interpreted, which is slower), or the path of the compiler's library. In the "
         "simulator of the tests: host, or the path of a C++ compiler."},
    Flag{"ORTRAIN_KERNEL_CACHE_DIR", "~/.cache/ortrain/kernels",
         "Folder of kernels compiled at run time, which later processes load: a path that "
         "belongs to the user alone, or off."},
    Flag{"ORTRAIN_CUDNN", "auto",
         "What NVIDIA's GPUs do by cuDNN, where it has an algorithm: auto (convolutions, and "
         "attention where it is known to be faster), conv (convolutions alone), all, or off."},
    Flag{"ORTRAIN_VERIFY_STEPS", "",
         "Steps of each ORTModule that run in PyTorch too and must agree: first, sampled (1, 2, 4, "
         "8, "
         "...) or a number of first steps."},
    Flag{"ORTRAIN_PIECES", "worthwhile",
         "Which pieces of a module that no graph holds whole run on the engine: worthwhile (those "
         "expected to gain by it; none of a module that loses by being cut) or all."},
    Flag{"ORTRAIN_STRICT", "0", "Raise instead of running anything outside the engine."},
};

}  // namespace

std::span<const Flag> all_flags() { return kFlags; }

std::string flag(std::string_view name) {
  for (const Flag& known : kFlags) {
    if (known.name != name) continue;
    const char* value = std::getenv(std::string(name).c_str());
    return value != nullptr ? std::string(value) : std::string(known.default_value);
  }
  throw InternalError(str("unknown flag ", name));
}

bool flag_is_on(std::string_view name) {
  std::string value = flag(name);
  std::transform(value.begin(), value.end(), value.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return value == "1" || value == "true" || value == "on" || value == "yes";
}

}  // namespace ortrain
