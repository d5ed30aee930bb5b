// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
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

// Only its user can open it; gone with the scope.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_((std::filesystem::temp_directory_path() / "ortrain-XXXXXX").string()) {
    check(mkdtemp(path_.data()) != nullptr, "no temporary folder");
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string compile_on_host(const std::string& command, const std::string& source) {
  const TemporaryFolder folder;
  std::vector<std::string> words = {command};
  for (const std::string& option : options()) words.push_back(option);
  for (const std::string& word :
       {folder.path() + "/kernel.cpp", std::string("-o"), folder.path() + "/kernel.so"}) {
    words.push_back(word);
  }
  std::ofstream(folder.path() + "/kernel.cpp") << kHostPrelude << source;
  const int status = run_command(words, folder.path() + "/log");
  std::string code = status == 0 ? read_file(folder.path() + "/kernel.so") : "";
  if (code.empty()) {
    throw InternalError(
        str(command, " failed (", status, "): ", read_file(folder.path() + "/log")));
  }
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

std::shared_ptr<void> open_code(const std::string& code) {
  // In a file of its own name: the loader takes one name for one library.
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/kernel.so";
  std::ofstream(path, std::ios::binary) << code;
  void* opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* error = opened == nullptr ? dlerror() : nullptr;
  if (opened == nullptr) throw InternalError(str("cannot load a kernel: ", error));
  const auto set_hooks =
      reinterpret_cast<void (*)(const void*)>(dlsym(opened, "ortrain_set_hooks"));
  if (set_hooks == nullptr) throw InternalError("the compiled code is of something else");
  set_hooks(&kHooks);
  return {opened, [](void* handle) { dlclose(handle); }};
}

std::shared_ptr<const LoadedKernel> load_on_host(const std::string& code,
                                                 const std::string& entry) {
  // Tests load many kernels from one piece of code.
  static std::mutex mutex;
  static auto* const opened = new std::map<std::string, std::weak_ptr<void>>();
  const std::lock_guard lock(mutex);
  std::weak_ptr<void>& known = (*opened)[code];
  std::shared_ptr<void> library = known.lock();
  if (library == nullptr) known = library = open_code(code);
  const auto run =
      reinterpret_cast<HostKernel::Run>(dlsym(library.get(), (entry + "_run").c_str()));
  if (run == nullptr) throw InternalError(str("the compiled code has no kernel ", entry));
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
