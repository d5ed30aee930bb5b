// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/onednn/gemm.h"

#include <array>
#include <list>
#include <map>
#include <unordered_map>
#include <utility>

#include "oneapi/dnnl/dnnl.hpp"
#include "ortrain/onednn/engine.h"

namespace ortrain::onednn {
namespace {

using dnnl::memory;

// A matrix product with its bias fused, prepared for one shape.
struct BiasedMatmul {
  using Key = std::array<int64_t, 8>;

  static Key key(const OrtrainOnednnGemm& g) {
    return {g.trans_a, g.trans_b, g.m, g.n, g.k, g.lda, g.ldb, g.ldc};
  }

  explicit BiasedMatmul(const OrtrainOnednnGemm& g) {
    const auto f32 = memory::data_type::f32;
    const memory::desc a({g.m, g.k}, f32,
                         g.trans_a ? memory::dims{1, g.lda} : memory::dims{g.lda, 1});
    const memory::desc b({g.k, g.n}, f32,
                         g.trans_b ? memory::dims{1, g.ldb} : memory::dims{g.ldb, 1});
    const memory::desc bias({1, g.n}, f32, memory::dims{g.n, 1});
    const memory::desc c({g.m, g.n}, f32, memory::dims{g.ldc, 1});
    dnnl::engine& engine = cpu_engine();
    primitive = dnnl::matmul(dnnl::matmul::primitive_desc(engine, a, b, bias, c));
    // Addresses are set before every run.
    arguments = {{DNNL_ARG_SRC, memory(a, engine, nullptr)},
                 {DNNL_ARG_WEIGHTS, memory(b, engine, nullptr)},
                 {DNNL_ARG_BIAS, memory(bias, engine, nullptr)},
                 {DNNL_ARG_DST, memory(c, engine, nullptr)}};
  }

  void run(const OrtrainOnednnGemm& g) {
    arguments[DNNL_ARG_SRC].set_data_handle(const_cast<float*>(g.a));
    arguments[DNNL_ARG_WEIGHTS].set_data_handle(const_cast<float*>(g.b));
    arguments[DNNL_ARG_BIAS].set_data_handle(const_cast<float*>(g.bias));
    arguments[DNNL_ARG_DST].set_data_handle(g.c);
    primitive.execute(thread_stream(), arguments);
    thread_stream().wait();
  }

  dnnl::matmul primitive;
  std::unordered_map<int, memory> arguments;
};

// The primitives that a thread used last: models have tens of shapes, and each new batch size or
// length brings as many again.
class MatmulCache {
 public:
  BiasedMatmul& get(const OrtrainOnednnGemm& g) {
    const auto key = BiasedMatmul::key(g);
    if (auto found = by_key_.find(key); found != by_key_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second);
      return found->second->second;
    }
    recent_.emplace_front(key, BiasedMatmul(g));
    by_key_.emplace(key, recent_.begin());
    if (recent_.size() > kMost) {
      by_key_.erase(recent_.back().first);
      recent_.pop_back();
    }
    return recent_.front().second;
  }

 private:
  static constexpr size_t kMost = 256;
  using Entry = std::pair<BiasedMatmul::Key, BiasedMatmul>;
  std::list<Entry> recent_;
  std::map<BiasedMatmul::Key, std::list<Entry>::iterator> by_key_;
};

}  // namespace

void run_gemm(const OrtrainOnednnGemm& g) {
  const bool fused = g.bias != nullptr && g.alpha == 1.0f && g.beta == 0.0f;
  if (fused) {
    static thread_local MatmulCache cache;
    cache.get(g).run(g);
    return;
  }
  float beta = g.beta;
  if (g.bias != nullptr) {
    // C becomes beta * C + bias, and the product is added to it.
    for (int64_t i = 0; i < g.m; ++i) {
      float* row = g.c + i * g.ldc;
      for (int64_t j = 0; j < g.n; ++j) {
        row[j] = (g.beta != 0.0f ? g.beta * row[j] : 0.0f) + g.bias[j];
      }
    }
    beta = 1.0f;
  }
  const dnnl::status status = dnnl::sgemm(g.trans_a ? 'T' : 'N', g.trans_b ? 'T' : 'N', g.m, g.n,
                                          g.k, g.alpha, g.a, g.lda, g.b, g.ldb, beta, g.c, g.ldc);
  dnnl::error::wrap_c_api(static_cast<dnnl_status_t>(status), "sgemm failed");
}

}  // namespace ortrain::onednn
