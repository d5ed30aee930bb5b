// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/onednn/gemm.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <list>
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "oneapi/dnnl/dnnl.hpp"
#include "ortrain/onednn/engine.h"
#include "ortrain/onednn/product_stack.h"

namespace ortrain::onednn {
namespace {

using dnnl::memory;

memory::data_type data_type_of(int32_t type) {
  switch (type) {
    case kOrtrainBF16:
      return memory::data_type::bf16;
    case kOrtrainF16:
      return memory::data_type::f16;
    default:
      return memory::data_type::f32;
  }
}

// A matrix product with its bias and its sum fused, prepared for one shape.
struct Matmul {
  using Key = std::array<int64_t, 9>;

  // A primitive is right only with as many threads as there were when it was made.
  static Key key(const OrtrainOnednnGemm& g) {
    const int64_t factors = static_cast<int64_t>(std::bit_cast<uint32_t>(g.alpha)) << 32 |
                            std::bit_cast<uint32_t>(g.beta);
    return {g.type << 3 | (g.bias != nullptr) << 2 | g.trans_a << 1 | g.trans_b,
            factors,
            g.m,
            g.n,
            g.k,
            g.lda,
            g.ldb,
            g.ldc,
            omp_get_max_threads()};
  }

  explicit Matmul(const OrtrainOnednnGemm& g) {
    const auto type = data_type_of(g.type);
    const memory::desc a({g.m, g.k}, type,
                         g.trans_a ? memory::dims{1, g.lda} : memory::dims{g.lda, 1});
    const memory::desc b({g.k, g.n}, type,
                         g.trans_b ? memory::dims{1, g.ldb} : memory::dims{g.ldb, 1});
    const memory::desc c({g.m, g.n}, type, memory::dims{g.ldc, 1});
    dnnl::post_ops after;
    if (g.alpha != 1.0f) after.append_eltwise(dnnl::algorithm::eltwise_linear, g.alpha, 0.0f);
    if (g.beta != 0.0f) after.append_sum(g.beta);
    dnnl::primitive_attr attributes;
    attributes.set_post_ops(after);
    dnnl::engine& engine = cpu_engine();
    // Addresses are set before every run.
    arguments = {{DNNL_ARG_SRC, memory(a, engine, nullptr)},
                 {DNNL_ARG_WEIGHTS, memory(b, engine, nullptr)},
                 {DNNL_ARG_DST, memory(c, engine, nullptr)}};
    if (g.bias != nullptr) {
      const memory::desc bias({1, g.n}, type, memory::dims{g.n, 1});
      description = dnnl::matmul::primitive_desc(engine, a, b, bias, c, attributes);
      arguments.emplace(DNNL_ARG_BIAS, memory(bias, engine, nullptr));
    } else {
      description = dnnl::matmul::primitive_desc(engine, a, b, c, attributes);
    }
    primitive = dnnl::matmul(description);
    is_blocked = std::string_view(description.impl_info_str()).starts_with("brg");
  }

  void run(const OrtrainOnednnGemm& g) {
    arguments[DNNL_ARG_SRC].set_data_handle(const_cast<void*>(g.a));
    arguments[DNNL_ARG_WEIGHTS].set_data_handle(const_cast<void*>(g.b));
    arguments[DNNL_ARG_DST].set_data_handle(g.c);
    if (g.bias != nullptr) {
      arguments[DNNL_ARG_BIAS].set_data_handle(const_cast<void*>(g.bias));
    }
    primitive.execute(thread_stream(), arguments);
    thread_stream().wait();
  }

  dnnl::matmul::primitive_desc description;
  dnnl::matmul primitive;
  bool is_blocked = false;  // neither sgemm nor oneDNN's reference
  std::unordered_map<int, memory> arguments;
};

// The primitives that a thread used last: models have tens of shapes, and each new batch size or
// length brings as many again.
class MatmulCache {
 public:
  Matmul& get(const OrtrainOnednnGemm& g) {
    const auto key = Matmul::key(g);
    if (auto found = by_key_.find(key); found != by_key_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second);
      return found->second->second;
    }
    recent_.emplace_front(key, Matmul(g));
    by_key_.emplace(key, recent_.begin());
    if (recent_.size() > kMost) {
      by_key_.erase(recent_.back().first);
      recent_.pop_back();
    }
    return recent_.front().second;
  }

 private:
  static constexpr size_t kMost = 128;
  using Entry = std::pair<Matmul::Key, Matmul>;
  std::list<Entry> recent_;
  std::map<Matmul::Key, std::list<Entry>::iterator> by_key_;
};

// Whether a product of this type runs on instructions for it. Without them oneDNN has reference
// code, or widens in front of its float product, which costs more than widening while packing.
bool has_instructions_for(int32_t type) {
  constexpr int64_t kSize = 64;
  try {
    const Matmul probe(OrtrainOnednnGemm{.type = type,
                                         .trans_a = 0,
                                         .trans_b = 1,
                                         .m = kSize,
                                         .n = kSize,
                                         .k = kSize,
                                         .alpha = 1.0f,
                                         .a = nullptr,
                                         .lda = kSize,
                                         .b = nullptr,
                                         .ldb = kSize,
                                         .beta = 0.0f,
                                         .c = nullptr,
                                         .ldc = kSize,
                                         .bias = nullptr});
    const std::string_view code = probe.description.impl_info_str();
    if (code.starts_with("gemm")) return false;
    const auto names = [&](std::string_view part) {
      return code.find(part) != std::string_view::npos;
    };
    return names("amx") || names(type == kOrtrainBF16 ? "bf16" : "fp16");
  } catch (const dnnl::error&) {
    return false;
  }
}

// Whether sgemm certainly copies the operands into blocks, however many of the threads it takes
// (nocopy_checker_avx512 in gemm_driver.cpp of oneDNN 3.2; its rows are the columns here).
bool sgemm_copies(const OrtrainOnednnGemm& g) {
  if (!has_avx512()) return false;
  constexpr double kPlaceIsBetter = 0.00196;
  constexpr int64_t kFewPerThread = 28;
  const int64_t threads = omp_get_max_threads();
  return 1.0 / static_cast<double>(g.m) + 1.0 / static_cast<double>(g.n) < kPlaceIsBetter &&
         std::min(g.m, g.n) > kFewPerThread * threads && g.k > threads;
}

// Measured with oneDNN 3.2 on AVX-512 at 16 to 4096 rows: a transposed B is multiplied 1.1 to 2.8
// times as fast by the matmul primitive, a product of any other B that sgemm copies up to 1.36
// times as fast by sgemm, a pass over C for the bias included; else they are equal, and the
// primitive keeps to the stack. Without AVX-512 the primitive is the same code as sgemm, or slower.
bool prefers_matmul(const OrtrainOnednnGemm& g) {
  if (g.type != kOrtrainF32) return true;
  if (!has_avx512()) return false;
  constexpr int64_t kLargeEnoughToPrepare = 128 * 128 * 128;
  if (g.bias != nullptr && g.alpha != 1.0f) return false;
  if (g.m * g.n * g.k < kLargeEnoughToPrepare) return false;
  return g.trans_b || !sgemm_copies(g);
}

void scale_and_add_bias(const OrtrainOnednnGemm& g) {
  const auto* bias = static_cast<const float*>(g.bias);
  constexpr int64_t kWorthSharing = 1 << 15;
#pragma omp parallel for if (g.m * g.n >= kWorthSharing)
  for (int64_t i = 0; i < g.m; ++i) {
    float* row = static_cast<float*>(g.c) + i * g.ldc;
    if (g.beta == 0.0f) {
      std::copy_n(bias, g.n, row);
    } else {
      for (int64_t j = 0; j < g.n; ++j) row[j] = g.beta * row[j] + bias[j];
    }
  }
}

void run_sgemm(const OrtrainOnednnGemm& g) {
  float beta = g.beta;
  if (g.bias != nullptr) {
    // C becomes beta * C + bias, and the product is added to it.
    scale_and_add_bias(g);
    beta = 1.0f;
  }
  const auto* a = static_cast<const float*>(g.a);
  const auto* b = static_cast<const float*>(g.b);
  const int64_t most = sgemm_copies(g) ? g.k : depth_in_stack();
  for (int64_t first = 0; first < g.k; first += most) {
    const dnnl::status status = dnnl::sgemm(
        g.trans_a ? 'T' : 'N', g.trans_b ? 'T' : 'N', g.m, g.n, std::min(most, g.k - first),
        g.alpha, a + (g.trans_a ? first * g.lda : first), g.lda,
        b + (g.trans_b ? first : first * g.ldb), g.ldb, beta, static_cast<float*>(g.c), g.ldc);
    dnnl::error::wrap_c_api(static_cast<dnnl_status_t>(status), "sgemm failed");
    beta = 1.0f;
  }
}

// Measured with oneDNN 3.2 on AVX-512: the primitive takes 1.3 times as long for 3072 columns, and
// 1.2 to 1.5 times for a depth of 32000 to 50000, as in blocks of these sizes.
constexpr int64_t kMostColumns = 1536;
constexpr int64_t kMostDepth = 4096;

// The extent in as few equal parts of at most `most` as there can be, in multiples of 64.
int64_t block_of(int64_t extent, int64_t most) {
  constexpr int64_t kMultiple = 64;
  const int64_t parts = (extent + most - 1) / most;
  const int64_t part = (extent + parts - 1) / parts;
  return (part + kMultiple - 1) / kMultiple * kMultiple;
}

void run_matmul(const OrtrainOnednnGemm& g) {
  static thread_local MatmulCache cache;
  Matmul& matmul = cache.get(g);
  if (g.type == kOrtrainF32 && !matmul.is_blocked) return run_sgemm(g);
  matmul.run(g);
}

}  // namespace

uint32_t gemm_types() {
  static const uint32_t types = [] {
    uint32_t found = 1u << kOrtrainF32;
    for (const int32_t type : {kOrtrainBF16, kOrtrainF16}) {
      if (has_instructions_for(type)) found |= 1u << type;
    }
    return found;
  }();
  return types;
}

void run_gemm(const OrtrainOnednnGemm& g) {
  if (!prefers_matmul(g)) return run_sgemm(g);
  const bool in_blocks = g.type == kOrtrainF32 && !g.trans_b;
  const int64_t columns = in_blocks ? block_of(g.n, kMostColumns) : g.n;
  const int64_t depth = in_blocks ? block_of(g.k, kMostDepth) : g.k;
  for (int64_t k = 0; k < g.k; k += depth) {
    for (int64_t n = 0; n < g.n; n += columns) {
      OrtrainOnednnGemm block = g;
      block.n = std::min(columns, g.n - n);
      block.k = std::min(depth, g.k - k);
      if (in_blocks) {
        block.a = static_cast<const float*>(g.a) + (g.trans_a ? k * g.lda : k);
        block.b = static_cast<const float*>(g.b) + k * g.ldb + n;
        block.c = static_cast<float*>(g.c) + n;
        if (g.bias != nullptr) block.bias = static_cast<const float*>(g.bias) + n;
        if (k > 0) {
          block.beta = 1.0f;
          block.bias = nullptr;
        }
      }
      run_matmul(block);
    }
  }
}

}  // namespace ortrain::onednn
