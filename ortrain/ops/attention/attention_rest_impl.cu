// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/attention/attention_kernels.h"

namespace ortrain::gpu {
namespace {

ORTRAIN_DEVICE void check_offsets(const AttentionProblem& p, const FaultReporter& faults) {
  for_each_item(p.sequences + 1, [&](int64_t n) {
    const int64_t before = n == 0 ? 0 : p.offsets[n - 1];
    const int64_t most = n == 0 ? 0 : p.queries;
    if (p.offsets[n] < before || p.offsets[n] > most) {
      faults.report(FaultKind::offset, p.offsets[n], n, before, most);
    }
  });
}

template <class T>
__global__ void __launch_bounds__(256) rest_of_results(AttentionProblem p, FaultReporter faults) {
  using C = ComputeType<T>;
  check_offsets(p, faults);
  const int64_t end = sequence_offset(p, p.sequences);
  const int64_t width = p.heads * p.value_dim;  // rows of all heads are contiguous
  T* const out = static_cast<T*>(p.out);
  for_each_item((p.queries - end) * width, [&](int64_t item) {
    out[end * width + item] = end == 0 ? static_cast<T>(C{0}) : out[item % width];
  });
  if (p.logsumexp == nullptr) return;
  for_each_item((p.queries - end) * p.heads, [&](int64_t item) {
    const int64_t i = end + item % (p.queries - end);
    static_cast<C*>(p.logsumexp)[p.row(0, item / (p.queries - end), i)] =
        std::numeric_limits<C>::infinity();
  });
}

template <class T>
__global__ void __launch_bounds__(256)
    rest_of_gradients(AttentionBackwardProblem p, FaultReporter faults) {
  const AttentionProblem& f = p.forward;
  check_offsets(f, faults);
  const int64_t end = sequence_offset(f, f.sequences);
  const auto clear = [&](void* data, int64_t width) {
    if (data == nullptr) return;
    for_each_item((f.queries - end) * width, [&](int64_t item) {
      static_cast<T*>(data)[end * width + item] = static_cast<T>(ComputeType<T>{0});
    });
  };
  clear(p.dq, f.heads * f.head_dim);
  clear(p.dk, f.kv_heads * f.head_dim);
  clear(p.dv, f.kv_heads * f.value_dim);
}

// How many rows are left is not known here; mostly few.
constexpr LaunchShape kFewBlocks{.blocks = 128, .threads = 256};

}  // namespace

void attention_rest(DType type, const AttentionProblem& p, const FaultReporter& faults,
                    void* stream) {
  dispatch_float(type, [&](auto tag) {
    launch(rest_of_results<typename decltype(tag)::type>, kFewBlocks, stream, p, faults);
  });
}

void attention_rest(DType type, const AttentionBackwardProblem& p, const FaultReporter& faults,
                    void* stream) {
  dispatch_float(type, [&](auto tag) {
    launch(rest_of_gradients<typename decltype(tag)::type>, kFewBlocks, stream, p, faults);
  });
}

}  // namespace ortrain::gpu
