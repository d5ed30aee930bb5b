// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/cudnn.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/base/flags.h"
#include "ortrain/base/log.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/library_folders.h"

namespace ortrain::gpu {
namespace {

constexpr const char* kName = "libcudnn.so.9";
constexpr uintptr_t kWorkspaceAlignment = 256;
constexpr size_t kMostPlans = 512;  // kept; those of nodes live as long as these

struct Made {
  std::shared_ptr<CudnnPlan> plan;
  std::string why;
};

struct Search {
  std::mutex mutex;
  std::string path;
  bool done = false;
  std::shared_ptr<Cudnn> found, given;
  std::string why;
  std::map<std::string, Made> plans;
  std::deque<std::string> order;  // of the plans, oldest first

  void forget() {
    plans.clear();
    order.clear();
  }
};

Search& search() {
  static auto* const one = new Search();
  return *one;
}

std::shared_ptr<Cudnn> look(const std::string& path, std::string& why) {
  why = str("no ", kName, " is found");
  if (!path.empty()) {
    const bool folder = std::filesystem::is_directory(path);
    const std::string file = folder ? (std::filesystem::path(path) / kName).string() : path;
    if (void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      if (auto found = make_cudnn(library, std::nullopt, why)) return found;
    } else if (const char* error = dlerror()) {
      why = error;
    }
  }
  if (platform() != "cuda") return nullptr;
  void* const library = open_library(kName, why);
  return library == nullptr ? nullptr : make_cudnn(library, std::nullopt, why);
}

void append(std::string& key, int64_t value) { key += std::to_string(value) + ' '; }
void append(std::string& key, std::span<const int64_t> values) {
  for (const int64_t value : values) append(key, value);
  key += "| ";
}

std::string key_of(const CudnnConvolution& p) {
  std::string key = "convolution ";
  append(key, static_cast<int64_t>(p.direction));
  append(key, static_cast<int64_t>(p.dtype));
  append(key, p.rounds_to_tf32);
  append(key, p.has_bias);
  append(key, p.alignment);
  for (const Dims* dims :
       {&p.x, &p.w, &p.y, &p.strides, &p.dilations, &p.pads_begin, &p.pads_end}) {
    append(key, *dims);
  }
  return key;
}

std::string key_of(const CudnnAttention& p) {
  std::string key = "attention ";
  append(key, p.backward);
  append(key, static_cast<int64_t>(p.dtype));
  for (const int64_t extent :
       {p.batch, p.heads, p.kv_heads, p.queries, p.keys, p.head_dim, p.value_dim}) {
    append(key, extent);
  }
  for (const CudnnAttention::Strides* strides : {&p.q, &p.k, &p.v, &p.out}) append(key, *strides);
  key += str(std::hexfloat, p.scale, " ");
  append(key, p.causal);
  append(key, p.keeps_logsumexp);
  return key;
}

class LogAtEnd {
 public:
  explicit LogAtEnd(const std::string& line) : line_(line) {}
  ~LogAtEnd() {
    if (!line_.empty() && log_enabled("dispatch")) log_line("dispatch", line_);
  }
  LogAtEnd(const LogAtEnd&) = delete;
  LogAtEnd& operator=(const LogAtEnd&) = delete;

 private:
  const std::string& line_;
};

std::atomic<bool> convolutions_round_to_tf32{false};

template <class Problem>
std::shared_ptr<CudnnPlan> plan_of(const Problem& problem, std::string& why) {
  std::shared_ptr<Cudnn> library = find_cudnn(why);
  if (!library) return nullptr;
  Search& s = search();
  std::string line;  // written without the lock: loggers may wait for others
  const LogAtEnd log(line);
  const std::lock_guard lock(s.mutex);
  const std::string key = str(current_device(), " ", key_of(problem));
  const auto known = s.plans.find(key);
  if (known != s.plans.end()) {
    why = known->second.why;
    return known->second.plan;
  }
  Made made;
  try {
    made.plan = library->plan(problem, made.why);
  } catch (const DeviceError& error) {  // the next node may ask again
    why = error.what();
    line = str("cuDNN, ", key, ": ", why);
    return nullptr;
  }
  line = str("cuDNN, ", key, ": ", made.plan ? made.plan->engine() : made.why);
  if (s.order.size() >= kMostPlans) {
    s.plans.erase(s.order.front());
    s.order.pop_front();
  }
  s.plans[key] = made;
  s.order.push_back(key);
  why = made.why;
  return made.plan;
}

}  // namespace

std::shared_ptr<Cudnn> find_cudnn(std::string& why) {
  Search& s = search();
  std::string line;
  const LogAtEnd log(line);
  const std::lock_guard lock(s.mutex);
  if (s.given) return s.given;
  if (!s.done) {
    s.done = true;
    s.found = look(s.path, s.why);
    line = s.found ? str("cuDNN ", s.found->version()) : "no cuDNN: " + s.why;
  }
  why = s.why;
  return s.found;
}

void set_cudnn_path(std::string path) {
  Search& s = search();
  const std::lock_guard lock(s.mutex);
  s.path = std::move(path);
  s.done = false;
  s.found = nullptr;
  s.forget();
}

void set_cudnn(std::shared_ptr<Cudnn> library) {
  Search& s = search();
  const std::lock_guard lock(s.mutex);
  s.given = std::move(library);
  s.forget();
}

std::optional<CudnnUse> cudnn_use(std::string& why) {
  const std::string value = flag("ORTRAIN_CUDNN");
  if (value == "off") return CudnnUse::off;
  if (value == "conv") return CudnnUse::conv;
  if (value == "auto") return CudnnUse::automatic;
  if (value == "all") return CudnnUse::all;
  why = str("ORTRAIN_CUDNN is '", value, "'; it can be auto, off, conv or all");
  return std::nullopt;
}

std::shared_ptr<CudnnPlan> cudnn_plan(const CudnnConvolution& problem, std::string& why) {
  return plan_of(problem, why);
}
std::shared_ptr<CudnnPlan> cudnn_plan(const CudnnAttention& problem, std::string& why) {
  return plan_of(problem, why);
}

void set_allow_tf32_convolutions(bool allow) { convolutions_round_to_tf32 = allow; }
bool allow_tf32_convolutions() { return convolutions_round_to_tf32; }

ByteCount cudnn_workspace(const CudnnPlan& plan) {
  const size_t bytes = plan.workspace_bytes();
  return bytes == 0 ? ByteCount() : bytes_of<char>(bytes) + bytes_of<char>(kWorkspaceAlignment - 1);
}

void run_cudnn(CudnnPlan& plan, std::span<void* const> operands, void* workspace, void* stream) {
  const auto place = (reinterpret_cast<uintptr_t>(workspace) + kWorkspaceAlignment - 1) /
                     kWorkspaceAlignment * kWorkspaceAlignment;
  plan.run(operands, plan.workspace_bytes() == 0 ? nullptr : reinterpret_cast<void*>(place),
           stream);
}

bool are_aligned(std::span<void* const> addresses, int64_t alignment) {
  return std::ranges::all_of(addresses, [&](const void* address) {
    return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(alignment) == 0;
  });
}

}  // namespace ortrain::gpu
