// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/gemm_any.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ops/loss/cross_entropy_rows.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// Rows at a time: as many as keep a product busy, few enough that their logits stay small beside
// those of a long batch.
constexpr int64_t kChunkRows = 512;
constexpr size_t kBase = 6;

struct Head {
  CrossEntropyConfig config;
  DType dtype;
  int64_t rows, classes, features, chunk;
  bool wants_dx, wants_dweight, wants_dbias, has_base;

  explicit Head(const NodeSpec& spec)
      : config{ops::LabelRows(spec, 1, 2), spec.attrs().float_("label_smoothing"), false,
               spec.attrs().int_("full_loss") != 0},
        dtype(spec.input(1).dtype),
        rows(spec.input(1).dims[0]),
        classes(spec.input(1).dims[1]),
        features(spec.input(4).dims.back()),
        // The weight gradient is summed over chunks in its own type: in 16 bits not over many.
        chunk(size_of(dtype) == 2 ? rows : std::min(rows, kChunkRows)),
        wants_dx(spec.has_output(0)),
        wants_dweight(spec.has_output(1)),
        wants_dbias(spec.has_output(2)),
        has_base(spec.has_input(kBase)) {}

  ByteCount label_bytes() const { return CrossEntropyWorkspace::bytes(rows).rounded_up(64); }
  ByteCount index_bytes() const { return bytes_of<int64_t>(rows).rounded_up(64); }
  ByteCount logit_bytes() const {
    return ByteCount::of(size_of(dtype), chunk, classes).rounded_up(64);
  }
  ByteCount feature_bytes() const {
    return ByteCount::of(size_of(dtype), chunk, features).rounded_up(64);
  }
  ByteCount bytes() const {
    return label_bytes() + index_bytes() + logit_bytes() + feature_bytes() * 2 +
           bytes_of<double>(classes);
  }
};

// Gradients of the logits of rows counted[0 .. count).
template <class T>
void logit_gradients(const CrossEntropyGradRun<T>& run, const KernelArgs& args,
                     const int64_t* counted, int64_t count, T* out) {
  using C = ComputeType<T>;
  const int64_t n = run.c.rows.split.size;
  const auto ops = row_ops<C>();
  parallel_for(count, row_grain(n), [&](int64_t begin, int64_t end) {
    RowAccess<T, 2> access(n);
    for (int64_t r = begin; r < end; ++r) {
      const C* x = access.read(0, args.input<T>(1) + counted[r] * n);
      run.row(ops, counted[r], x, nullptr, access.target(1, out + r * n));
      access.write(1, out + r * n);
    }
  });
}

// sums[j] += the column j of rows[count, n], row by row.
template <class T>
void add_columns(const T* rows, int64_t count, int64_t n, double* sums) {
  constexpr int64_t kColumns = 256;
  parallel_for((n + kColumns - 1) / kColumns, row_grain(count * kColumns),
               [&](int64_t begin, int64_t end) {
                 const int64_t last = std::min(n, end * kColumns);
                 for (int64_t r = 0; r < count; ++r) {
                   for (int64_t j = begin * kColumns; j < last; ++j) {
                     sums[j] += static_cast<double>(rows[r * n + j]);
                   }
                 }
               });
}

template <class T>
void run_head(const Head& h, const KernelArgs& args) {
  const CrossEntropyGradRun<T> run(h.config, args, true);
  char* memory = static_cast<char*>(args.workspace) + h.label_bytes().value();
  auto* counted = reinterpret_cast<int64_t*>(memory);
  T* dlogits = reinterpret_cast<T*>(memory += h.index_bytes().value());
  T* x_rows = reinterpret_cast<T*>(memory += h.logit_bytes().value());
  T* dx_rows = reinterpret_cast<T*>(memory += h.feature_bytes().value());
  auto* bias_sums = reinterpret_cast<double*>(memory + h.feature_bytes().value());

  int64_t count = 0;
  for (int64_t i = 0; i < h.rows; ++i) {
    if (run.labels[i] >= 0) counted[count++] = i;
  }
  const bool all = count == h.rows;
  const size_t row_bytes = static_cast<size_t>(h.features) * sizeof(T);
  const size_t weight_bytes = static_cast<size_t>(h.classes) * row_bytes;
  if (h.wants_dx && !all) {
    std::memset(args.out[0], 0, static_cast<size_t>(h.rows) * row_bytes);
  }
  if (h.wants_dbias) std::fill(bias_sums, bias_sums + h.classes, 0.0);
  bool summed = h.has_base;
  if (h.wants_dweight && h.has_base && args.in[kBase] != args.out[1]) {
    std::memcpy(args.out[1], args.in[kBase], weight_bytes);
  }
  const T* x = args.input<T>(4);
  for (int64_t begin = 0; begin < count; begin += h.chunk) {
    const int64_t rows = std::min(h.chunk, count - begin);
    logit_gradients(run, args, counted + begin, rows, dlogits);
    if (h.wants_dbias) add_columns(dlogits, rows, h.classes, bias_sums);
    const T* features = x + begin * h.features;
    if (!all && h.wants_dweight) {
      for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(x_rows + r * h.features, x + counted[begin + r] * h.features, row_bytes);
      }
      features = x_rows;
    }
    if (h.wants_dweight) {
      gemm_any(h.dtype, true, false, h.classes, h.features, rows, 1.0, dlogits, h.classes, features,
               h.features, summed ? 1.0 : 0.0, args.out[1], h.features);
      summed = true;
    }
    if (!h.wants_dx) continue;
    T* dx = all ? args.output<T>(0) + begin * h.features : dx_rows;
    gemm_any(h.dtype, false, false, rows, h.features, h.classes, 1.0, dlogits, h.classes,
             args.in[5], h.features, 0.0, dx, h.features);
    if (all) continue;
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(args.output<T>(0) + counted[begin + r] * h.features, dx_rows + r * h.features,
                  row_bytes);
    }
  }
  if (h.wants_dweight && !summed) std::memset(args.out[1], 0, weight_bytes);
  if (h.wants_dbias) {
    for (int64_t j = 0; j < h.classes; ++j) {
      args.output<T>(2)[j] = static_cast<T>(static_cast<ComputeType<T>>(bias_sums[j]));
    }
  }
}

KernelFn make_head(NodeSpec& spec) {
  const Head head(spec);
  spec.request_workspace(head.bytes());
  return dispatch_float(head.dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [head](const KernelArgs& args) { run_head<T>(head, args); };
  });
}

// The formula, element by element.
template <class T>
void run_reference(const Head& h, const KernelArgs& args) {
  const CrossEntropyGradRun<T> run(h.config, args, true);
  const T* x = args.input<T>(4);
  const T* weight = args.input<T>(5);
  const auto dlogit = [&](int64_t i, int64_t c) {
    if (run.labels[i] < 0) return 0.0;
    const double score = static_cast<double>(args.input<T>(1)[i * h.classes + c]);
    const double p = std::exp(score - static_cast<double>(args.input<ComputeType<T>>(3)[i]));
    const double value = p * (run.hit(i) + run.spread(i) * run.total_weight) - run.spread(i);
    return c == run.labels[i] ? value - run.hit(i) : value;
  };
  const auto store = [](T* out, double value) {
    *out = static_cast<T>(static_cast<ComputeType<T>>(value));
  };
  for (int64_t i = 0; h.wants_dx && i < h.rows; ++i) {
    for (int64_t k = 0; k < h.features; ++k) {
      double sum = 0;
      for (int64_t c = 0; c < h.classes; ++c) {
        sum += dlogit(i, c) * static_cast<double>(weight[c * h.features + k]);
      }
      store(args.output<T>(0) + i * h.features + k, sum);
    }
  }
  for (int64_t c = 0; c < h.classes; ++c) {
    for (int64_t k = 0; h.wants_dweight && k < h.features; ++k) {
      const int64_t at = c * h.features + k;
      double sum = h.has_base ? static_cast<double>(args.input<T>(kBase)[at]) : 0.0;
      for (int64_t i = 0; i < h.rows; ++i) {
        sum += dlogit(i, c) * static_cast<double>(x[i * h.features + k]);
      }
      store(args.output<T>(1) + at, sum);
    }
    if (!h.wants_dbias) continue;
    double sum = 0;
    for (int64_t i = 0; i < h.rows; ++i) sum += dlogit(i, c);
    store(args.output<T>(2) + c, sum);
  }
}

KernelFn make_reference(NodeSpec& spec) {
  const Head head(spec);
  spec.request_workspace(CrossEntropyWorkspace::bytes(head.rows));
  return dispatch_float(head.dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [head](const KernelArgs& args) { run_reference<T>(head, args); };
  });
}

}  // namespace

void register_classifier_loss(KernelRegistry& registry) {
  registry.add("ortrain::ClassifierLossGrad",
               {{.name = "chunks", .make = make_head, .inplace = {{kBase, 1}}},
                {.name = "ref", .make = make_reference, .inplace = {{kBase, 1}}}});
}

}  // namespace ortrain::cpu
