// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Makes plans by cuDNN for devices that are not there, for tools/check_cudnn_plans.py:
//   print_cudnn_plans LIBCUDNN 80|90
// One line each; the exit status is 1 where a problem that needs one has no plan.

#include <dlfcn.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/cudnn.h"
#include "ortrain/gpu/gpu_device.h"

namespace ortrain::gpu {
// Asked for a device that is there alone.
int current_device() { return 0; }
int compute_capability(int) { return 0; }
}  // namespace ortrain::gpu

namespace {

using namespace ortrain;
using namespace ortrain::gpu;
using Direction = CudnnConvolution::Direction;

struct Device {
  const char* name;
  int multiprocessors, shared_memory, cache, clock, memory_clock;
};

DescribedDevice describe(int capability) {
  const Device d = capability >= 90
                       ? Device{"NVIDIA H100 80GB HBM3", 132, 232448, 50 << 20, 1980000, 2619000}
                       : Device{"NVIDIA A100-SXM4-80GB", 108, 166912, 40 << 20, 1410000, 1593000};
  return {str(R"({"cudaDeviceId":0,"deviceName":")", d.name, R"(","deviceVer":)", capability * 10,
              R"(,"driverVer":13000,"isTccDriver":0,"l2CacheSize":)", d.cache,
              R"(,"maxBlockSize":[1024,1024,64],"maxCtasPerSM":32)",
              R"(,"maxGridSize":[2147483647,65535,65535],"maxRegistersPerSM":65536)",
              R"(,"maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":)",
              d.shared_memory, R"(,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048)",
              R"(,"memClockRateKHz":)", d.memory_clock, R"(,"multiProcessorCount":)",
              d.multiprocessors, R"(,"smCountOrigin":0,"pciDeviceId":0,"regsPerBlock":65536)",
              R"(,"reservedSharedMemoryPerBlock":1024,"smClockRateKHz":)", d.clock,
              R"(,"supportCoopLaunch":1,"totalGlobalMem":85899345920,"warpSize":32})"),
          capability};
}

class Report {
 public:
  explicit Report(Cudnn& library, int capability) : library_(library), capability_(capability) {}

  template <class Problem>
  void print(const std::string& name, const Problem& problem, bool needed) {
    std::string why;
    const auto start = std::chrono::steady_clock::now();
    const auto plan = library_.plan(problem, why);
    const double ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    if (plan) {
      std::printf("sm_%d  %-8s %-52s %7.1f MiB %5.0f ms  %s\n", capability_,
                  std::string(name_of(problem.dtype)).c_str(), name.c_str(),
                  static_cast<double>(plan->workspace_bytes()) / (1 << 20), ms,
                  plan->engine().c_str());
    } else {
      std::printf("sm_%d  %-8s %-52s %s  %s\n", capability_,
                  std::string(name_of(problem.dtype)).c_str(), name.c_str(),
                  needed ? "MISSING" : "none", why.c_str());
    }
    std::fflush(stdout);
    (plan ? made : none) += 1;
    missing += !plan && needed;
  }

  int made = 0, none = 0, missing = 0;

 private:
  Cudnn& library_;
  int capability_;
};

struct Conv {
  const char* name;
  Dims x, w;
  int64_t groups;
  Dims strides, dilations, begin, end;
};

std::vector<Conv> convolutions() {
  return {
      {"3x3", {32, 64, 56, 56}, {64, 64, 3, 3}, 1, {1, 1}, {1, 1}, {1, 1}, {1, 1}},
      {"3x3 by 2", {32, 128, 56, 56}, {128, 128, 3, 3}, 1, {2, 2}, {1, 1}, {1, 1}, {1, 1}},
      {"7x7 by 2", {32, 3, 224, 224}, {64, 3, 7, 7}, 1, {2, 2}, {1, 1}, {3, 3}, {3, 3}},
      {"1x1", {32, 256, 56, 56}, {64, 256, 1, 1}, 1, {1, 1}, {1, 1}, {0, 0}, {0, 0}},
      {"1x1 by 2", {32, 256, 56, 56}, {512, 256, 1, 1}, 1, {2, 2}, {1, 1}, {0, 0}, {0, 0}},
      {"1x1 by 2, large", {128, 256, 56, 56}, {512, 256, 1, 1}, 1, {2, 2}, {1, 1}, {0, 0}, {0, 0}},
      {"1x1, large", {128, 64, 56, 56}, {256, 64, 1, 1}, 1, {1, 1}, {1, 1}, {0, 0}, {0, 0}},
      {"7x7 by 2, large", {128, 3, 224, 224}, {64, 3, 7, 7}, 1, {2, 2}, {1, 1}, {3, 3}, {3, 3}},
      {"3x3, few channels", {1, 16, 14, 140}, {8, 16, 3, 3}, 1, {1, 1}, {1, 1}, {1, 1}, {1, 1}},
      {"patches 16", {64, 3, 224, 224}, {1024, 3, 16, 16}, 1, {16, 16}, {1, 1}, {0, 0}, {0, 0}},
      {"line 3", {8, 80, 1, 3000}, {384, 80, 1, 3}, 1, {1, 1}, {1, 1}, {0, 1}, {0, 1}},
      {"line 3 by 2", {8, 384, 1, 3000}, {384, 384, 1, 3}, 1, {1, 2}, {1, 1}, {0, 1}, {0, 1}},
      {"uneven pads", {8, 32, 28, 28}, {32, 32, 4, 4}, 1, {1, 1}, {1, 1}, {1, 1}, {2, 2}},
      {"pads in front", {2, 32, 28, 28}, {32, 32, 3, 3}, 1, {1, 1}, {1, 1}, {2, 2}, {0, 0}},
      {"odd", {2, 3, 9, 8}, {5, 3, 3, 3}, 1, {2, 2}, {1, 1}, {1, 1}, {1, 1}},
      {"4 groups", {8, 64, 28, 28}, {64, 16, 3, 3}, 4, {1, 1}, {1, 1}, {1, 1}, {1, 1}},
      {"3 odd groups", {2, 9, 11, 7}, {15, 3, 3, 2}, 3, {1, 2}, {1, 1}, {1, 0}, {0, 1}},
      {"32 groups of 4", {32, 128, 56, 56}, {128, 4, 3, 3}, 32, {1, 1}, {1, 1}, {1, 1}, {1, 1}},
      {"depthwise", {8, 64, 28, 28}, {64, 1, 3, 3}, 64, {1, 1}, {1, 1}, {1, 1}, {1, 1}},
      {"dilated", {8, 64, 28, 28}, {64, 64, 3, 3}, 1, {1, 1}, {2, 2}, {2, 2}, {2, 2}},
      {"dilated by 2", {2, 6, 21, 22}, {6, 6, 3, 2}, 1, {2, 2}, {2, 3}, {0, 1}, {0, 1}},
      {"volume",
       {2, 16, 8, 16, 16},
       {32, 16, 3, 3, 3},
       1,
       {1, 1, 1},
       {1, 1, 1},
       {1, 1, 1},
       {1, 1, 1}},
      {"volume groups",
       {2, 4, 3, 4, 5},
       {4, 2, 3, 1, 2},
       2,
       {2, 1, 2},
       {1, 1, 1},
       {1, 0, 0},
       {1, 0, 0}},
  };
}

CudnnConvolution problem_of(const Conv& c, DType dtype) {
  CudnnConvolution p{.dtype = dtype,
                     .x = c.x,
                     .w = c.w,
                     .y = {c.x[0], c.w[0]},
                     .strides = c.strides,
                     .dilations = c.dilations,
                     .pads_begin = c.begin,
                     .pads_end = c.end};
  for (size_t i = 0; i < c.strides.size(); ++i) {
    const int64_t span = (c.w[i + 2] - 1) * c.dilations[i] + 1;
    p.y.push_back((c.x[i + 2] + c.begin[i] + c.end[i] - span) / c.strides[i] + 1);
  }
  return p;
}

void print_convolutions(Report& report) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const Conv& conv : convolutions()) {
      CudnnConvolution p = problem_of(conv, dtype);
      const auto print = [&](const std::string& what) {
        report.print(str("conv ", conv.name, what), p, true);
      };
      for (const bool tf32 : {false, true}) {
        if (tf32 && dtype != DType::f32) continue;
        p.rounds_to_tf32 = tf32;
        const std::string kind = tf32 ? ", tf32" : "";
        p.direction = Direction::forward;
        print(", forward" + kind);
        p.direction = Direction::input;
        print(", input" + kind);
        p.direction = Direction::weight;
        print(", weight" + kind);
      }
      p.rounds_to_tf32 = false;
      p.has_bias = true;
      p.direction = Direction::forward;
      print(", forward, bias");
      p.has_bias = false;
      p.alignment = static_cast<int64_t>(size_of(dtype));
      for (const Direction direction : {Direction::forward, Direction::input, Direction::weight}) {
        p.direction = direction;
        report.print(str("conv ", conv.name, ", any address ", static_cast<int>(direction)), p,
                     false);
      }
    }
  }
}

struct Heads {
  const char* name;
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  bool causal, packed;
};

void print_attention(Report& report, int capability) {
  const std::vector<Heads> all = {
      {"12 heads of 64", 8, 12, 12, 1024, 1024, 64, 64, true, true},
      {"16 heads of 64, full", 32, 16, 16, 512, 512, 64, 64, false, true},
      {"32 heads of 64, 8 of keys", 4, 32, 8, 2048, 2048, 64, 64, true, false},
      {"32 heads of 128, 8 of keys", 4, 32, 8, 2048, 2048, 128, 128, true, true},
      {"16 heads of 128", 2, 16, 16, 4096, 4096, 128, 128, true, false},
      {"12 heads of 96, more keys", 2, 12, 12, 512, 1024, 96, 96, true, false},
      {"12 heads of 80, more queries", 2, 12, 12, 1024, 513, 80, 80, true, true},
      {"16 heads of 64, 577 rows", 8, 16, 16, 577, 577, 64, 64, false, true},
      {"12 heads of 64, 197 rows", 8, 12, 12, 197, 197, 64, 64, false, true},
      {"8 heads of 256", 2, 8, 8, 1024, 1024, 256, 256, true, false},
      {"8 heads of 80, values of 64", 2, 8, 8, 600, 600, 80, 64, false, false},
      {"3 heads of 20", 2, 3, 3, 50, 70, 20, 20, false, false},
  };
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const Heads& h : all) {
      const auto strides = [&](int64_t heads, int64_t rows, int64_t dim) {
        return h.packed ? CudnnAttention::Strides{rows * heads * dim, dim, heads * dim}
                        : CudnnAttention::Strides{heads * rows * dim, rows * dim, dim};
      };
      CudnnAttention p{.dtype = dtype,
                       .batch = h.batch,
                       .heads = h.heads,
                       .kv_heads = h.kv_heads,
                       .queries = h.queries,
                       .keys = h.keys,
                       .head_dim = h.head_dim,
                       .value_dim = h.value_dim,
                       .q = strides(h.heads, h.queries, h.head_dim),
                       .k = strides(h.kv_heads, h.keys, h.head_dim),
                       .v = strides(h.kv_heads, h.keys, h.value_dim),
                       .out = strides(h.heads, h.queries, h.value_dim),
                       .scale = 1.0 / std::sqrt(static_cast<double>(h.head_dim)),
                       .causal = h.causal};
      // Those that `auto` gives it; see attention_cudnn.h.
      const bool needed = capability >= 90 && h.head_dim == h.value_dim && h.head_dim >= 64 &&
                          h.head_dim <= 128 && h.keys >= 512;
      report.print(str("attention ", h.name, ", forward"), p, needed);
      p.backward = true;
      report.print(str("attention ", h.name, ", backward"), p, false);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s LIBCUDNN 80|90\n", argv[0]);
    return 2;
  }
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  const int capability = std::atoi(argv[2]);
  std::string why;
  const auto cudnn = make_cudnn(library, describe(capability), why);
  if (!cudnn) {
    std::fprintf(stderr, "%s\n", why.c_str());
    return 2;
  }
  Report report(*cudnn, capability);
  print_convolutions(report);
  print_attention(report, capability);
  std::printf("sm_%d  cuDNN %zu: %d plans, %d problems without one, %d of them missing\n",
              capability, cudnn->version(), report.made, report.none, report.missing);
  std::fflush(stdout);
  // The library's own destructors expect a driver.
  std::_Exit(report.missing > 0 ? 1 : 0);
}
