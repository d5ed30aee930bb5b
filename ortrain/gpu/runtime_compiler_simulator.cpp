// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/base/flags.h"
#include "ortrain/gpu/host_compiler.h"
#include "ortrain/gpu/simulator.h"

extern char** environ;

namespace ortrain::gpu {
namespace {

// What the text of a kernel finds in place of a device: functions of this process.
struct Hooks {
  const simulator::Coordinates* (*coordinates)();
  void (*block_barrier)();
  uint64_t (*exchange_bits)(uint64_t bits, int lane);
};

const Hooks kHooks = {
    [] { return static_cast<const simulator::Coordinates*>(&simulator::coordinates); },
    simulator::block_barrier, simulator::exchange_bits};

// Stands in front of the source. The structs are those above and in simulator.h.
constexpr char kHostPrelude[] = R"(
#define ORTRAIN_EXPR_HOST 1
#define __global__
#define __device__
#define __launch_bounds__(...)
#define __shared__ static thread_local
namespace ortrain_host {
struct Index3 { unsigned x, y, z; };
struct Coordinates { Index3 thread, block, block_size, grid_size; };
struct Hooks {
  const Coordinates* (*coordinates)();
  void (*block_barrier)();
  unsigned long (*exchange_bits)(unsigned long, int);
};
static const Hooks* hooks;
}
extern "C" void ortrain_set_hooks(const void* hooks) {
  ortrain_host::hooks = static_cast<const ortrain_host::Hooks*>(hooks);
}
#define threadIdx (ortrain_host::hooks->coordinates()->thread)
#define blockIdx (ortrain_host::hooks->coordinates()->block)
#define blockDim (ortrain_host::hooks->coordinates()->block_size)
#define gridDim (ortrain_host::hooks->coordinates()->grid_size)
static void __syncthreads() { ortrain_host::hooks->block_barrier(); }
template <class T>
static T ortrain_host_exchange(T value, int mask) {
  unsigned long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = ortrain_host::hooks->exchange_bits(bits, static_cast<int>(threadIdx.x % 32) ^ mask);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
)";

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

std::vector<std::string> options() {
  // Contraction aside, which no option of the reference has, rounding is the processor's own.
  return {"-std=c++17",        "-O1", "-fPIC", "-shared", "-fno-strict-aliasing",
          "-ffp-contract=off", "-w",  "-x",    "c++"};
}

// Runs a command and waits for it; its exit status, what it says goes to `log`.
int run_command(const std::vector<std::string>& words, const std::string& log) {
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 2, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  pid_t child = 0;
  const int error =
      posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw InternalError(str("cannot run ", words[0], ": ", std::strerror(error)));
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::string compile_on_host(const std::string& command, const std::string& source) {
  std::string folder = (std::filesystem::temp_directory_path() / "ortrain-XXXXXX").string();
  check(mkdtemp(folder.data()) != nullptr, "no temporary folder");
  const auto finish = [&folder](std::string code) {
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
    return code;
  };
  std::vector<std::string> words = {command};
  for (const std::string& option : options()) words.push_back(option);
  std::ofstream(folder + "/kernel.cpp") << kHostPrelude << source;
  for (const std::string& word :
       {folder + "/kernel.cpp", std::string("-o"), folder + "/kernel.so"}) {
    words.push_back(word);
  }
  const int status = run_command(words, folder + "/log");
  const std::string log = read_file(folder + "/log");
  const std::string code = finish(status == 0 ? read_file(folder + "/kernel.so") : "");
  if (code.empty()) throw InternalError(str(command, " failed (", status, "): ", log));
  return code;
}

class HostKernel final : public LoadedKernel {
 public:
  using Run = void (*)(const void*);
  HostKernel(std::shared_ptr<void> library, Run run) : library_(std::move(library)), run_(run) {}

  void launch(unsigned blocks, unsigned threads, void*, const void* arguments) const override {
    if (blocks == 0) return;
    simulator::run({blocks, 1, 1}, threads, 0, [&] { run_(arguments); });
  }

 private:
  std::shared_ptr<void> library_;
  Run run_;
};

std::shared_ptr<const LoadedKernel> load_on_host(const std::string& code,
                                                 const std::string& entry) {
  const int memory = memfd_create("ortrain-kernel", MFD_CLOEXEC);
  check(memory >= 0, "no memory for the code of a kernel");
  const bool written = write(memory, code.data(), code.size()) == static_cast<ssize_t>(code.size());
  void* opened =
      written ? dlopen(str("/proc/self/fd/", memory).c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  const char* error = opened == nullptr ? dlerror() : nullptr;
  const std::string reason = error == nullptr ? "its code was not written" : error;
  close(memory);
  if (opened == nullptr) throw InternalError(str("cannot load ", entry, ": ", reason));
  std::shared_ptr<void> library(opened, [](void* handle) { dlclose(handle); });
  const auto set_hooks =
      reinterpret_cast<void (*)(const void*)>(dlsym(opened, "ortrain_set_hooks"));
  const auto run = reinterpret_cast<HostKernel::Run>(dlsym(opened, (entry + "_run").c_str()));
  if (set_hooks == nullptr || run == nullptr) {
    throw InternalError(str("the compiled code has no kernel ", entry));
  }
  set_hooks(&kHooks);
  return std::make_shared<HostKernel>(std::move(library), run);
}

}  // namespace

SourceCompiler host_source_compiler(const std::string& command) {
  SourceCompiler compiler;
  compiler.identity = str("host compiler ", command, " built with ", __VERSION__);
  for (const std::string& option : options()) compiler.identity += " " + option;
  compiler.identity += kHostPrelude;
  compiler.compile = [command](const std::string& source) {
    return compile_on_host(command, source);
  };
  compiler.load = load_on_host;
  return compiler;
}

const SourceCompiler* source_compiler(int, std::string* why_not) {
  const std::string wanted = flag("ORTRAIN_GPU_COMPILER");
  const bool is_path = wanted.find('/') != std::string::npos;
  if (wanted != "host" && !is_path) {
    *why_not = str("ORTRAIN_GPU_COMPILER is '", wanted,
                   "', and the simulator compiles only for host, or the path of a compiler");
    return nullptr;
  }
  static std::mutex mutex;
  static auto* const compilers = new std::map<std::string, SourceCompiler>();
  const std::lock_guard lock(mutex);
  const auto [place, is_first] = compilers->try_emplace(wanted);
  if (is_first) place->second = host_source_compiler(is_path ? wanted : "c++");
  return &place->second;
}

}  // namespace ortrain::gpu
