// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/row_access.h"
#include "ortrain/cpu/simd/row_ops.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// Throws before anything is read or written at an index outside of [0, rows).
template <class I>
void check_indices(const std::string& context, const I* indices, int64_t count, int64_t rows) {
  for (int64_t i = 0; i < count; ++i) {
    if (indices[i] < 0 || indices[i] >= rows) {
      throw IndexError(
          str(context, "index ", indices[i], " at position ", i, " is outside of [0, ", rows, ")"));
    }
  }
}

KernelFn make_gather(NodeSpec& spec) {
  const TensorSpec& weight = spec.input(0);
  const int64_t rows = weight.dims[0];
  const int64_t count = spec.input(1).numel();
  const int64_t row_size = num_elements(Dims(weight.dims.begin() + 1, weight.dims.end()));
  const size_t bytes = static_cast<size_t>(row_size) * size_of(weight.dtype);
  return dispatch_index(spec.input(1).dtype, [&](auto tag) -> KernelFn {
    using I = typename decltype(tag)::type;
    return [=, context = spec.context()](const KernelArgs& args) {
      const I* indices = args.input<I>(1);
      check_indices(context, indices, count, rows);
      if (bytes == 0) return;
      const char* from = args.input<char>(0);
      char* to = args.output<char>(0);
      parallel_for(count, row_grain(row_size), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          std::memcpy(to + static_cast<size_t>(i) * bytes,
                      from + static_cast<size_t>(indices[i]) * bytes, bytes);
        }
      });
    };
  });
}

struct Scatter {
  int64_t count, rows, row_size;
  bool has_base;
  bool has_padding;
  int64_t padding;
  std::string context;

  explicit Scatter(const NodeSpec& spec)
      : count(spec.input(1).numel()),
        rows(spec.output(0).dims[0]),
        row_size(num_elements(Dims(spec.output(0).dims.begin() + 1, spec.output(0).dims.end()))),
        has_base(spec.has_input(3)),
        context(spec.context()) {
    padding = spec.attrs().int_("padding_idx");
    has_padding = padding >= 0;
  }
};

// Every thread takes some columns and adds all rows there in order: no two threads share an element
// of the table, and the sums do not depend on the number of threads.
constexpr int64_t kColumns = 64;

template <class C, class I, class Row>
void add_rows(const Scatter& s, const I* indices, C* table, Row row) {
  const auto ops = row_ops<C>();
  const int64_t pieces = (s.row_size + kColumns - 1) / kColumns;
  parallel_for(pieces, row_grain(s.count * kColumns), [&](int64_t first, int64_t last) {
    const int64_t begin = first * kColumns;
    const int64_t n = std::min(s.row_size, last * kColumns) - begin;
    for (int64_t i = 0; i < s.count; ++i) {
      if (s.has_padding && indices[i] == s.padding) continue;
      row(ops, i, begin, n, table + static_cast<int64_t>(indices[i]) * s.row_size + begin);
    }
  });
}

template <class T, class I>
void scatter(const Scatter& s, const KernelArgs& args) {
  using C = ComputeType<T>;
  const I* indices = args.input<I>(1);
  const T* dy = args.input<T>(0);
  T* out = args.output<T>(0);
  check_indices(s.context, indices, s.count, s.rows);
  const int64_t size = s.rows * s.row_size;
  constexpr int64_t kGrain = 1 << 16;
  if constexpr (std::is_same_v<T, C>) {
    if (!s.has_base || args.in[3] != args.out[0]) {
      const T* base = s.has_base ? args.input<T>(3) : nullptr;
      parallel_for(size, kGrain, [&](int64_t begin, int64_t end) {
        if (base != nullptr) {
          std::copy(base + begin, base + end, out + begin);
        } else {
          std::fill(out + begin, out + end, T{0});
        }
      });
    }
    add_rows(s, indices, out,
             [&](const RowOps<C>& ops, int64_t i, int64_t begin, int64_t n, C* target) {
               ops.add(dy + i * s.row_size + begin, target, n);
             });
  } else {
    // Summed in float: many small terms would be lost in a 16-bit table.
    C* table = static_cast<C*>(args.workspace);
    const uint16_t* base = s.has_base ? args.input<uint16_t>(3) : nullptr;
    parallel_for(size, kGrain, [&](int64_t begin, int64_t end) {
      if (base != nullptr) {
        widen(kStorageOf<T>, base + begin, table + begin, end - begin);
      } else {
        std::fill(table + begin, table + end, C{0});
      }
    });
    add_rows(s, indices, table,
             [&](const RowOps<C>& ops, int64_t i, int64_t begin, int64_t n, C* target) {
               C* wide = scratch<C>(ScratchSlot::kConvert, n);
               widen(kStorageOf<T>, reinterpret_cast<const uint16_t*>(dy + i * s.row_size + begin),
                     wide, n);
               ops.add(wide, target, n);
             });
    parallel_for(size, kGrain, [&](int64_t begin, int64_t end) {
      narrow(kStorageOf<T>, table + begin, reinterpret_cast<uint16_t*>(out + begin), end - begin);
    });
  }
}

KernelFn make_scatter(NodeSpec& spec) {
  const Scatter s(spec);
  const DType type = spec.input(0).dtype;
  if (!kFullFloatTypes.contains(type)) {
    spec.request_workspace(bytes_of<float>(s.rows, s.row_size));
  }
  return dispatch_float(type, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return dispatch_index(spec.input(1).dtype, [&](auto index_tag) -> KernelFn {
      using I = typename decltype(index_tag)::type;
      return [s](const KernelArgs& args) { scatter<T, I>(s, args); };
    });
  });
}

KernelFn make_scatter_ref(NodeSpec& spec) {
  const Scatter s(spec);
  spec.request_workspace(bytes_of<double>(s.rows, s.row_size));
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return dispatch_index(spec.input(1).dtype, [&](auto index_tag) -> KernelFn {
      using I = typename decltype(index_tag)::type;
      return [s](const KernelArgs& args) {
        const I* indices = args.input<I>(1);
        check_indices(s.context, indices, s.count, s.rows);
        double* table = static_cast<double*>(args.workspace);
        const int64_t size = s.rows * s.row_size;
        for (int64_t j = 0; j < size; ++j) {
          table[j] = s.has_base ? static_cast<double>(args.input<T>(3)[j]) : 0.0;
        }
        for (int64_t i = 0; i < s.count; ++i) {
          if (s.has_padding && indices[i] == s.padding) continue;
          for (int64_t j = 0; j < s.row_size; ++j) {
            table[indices[i] * s.row_size + j] +=
                static_cast<double>(args.input<T>(0)[i * s.row_size + j]);
          }
        }
        for (int64_t j = 0; j < size; ++j) {
          args.output<T>(0)[j] = static_cast<T>(static_cast<ComputeType<T>>(table[j]));
        }
      };
    });
  });
}

}  // namespace

void register_embedding(KernelRegistry& registry) {
  registry.add("ortrain::Embedding", {{.name = "ref", .make = make_gather}});
  registry.add("ortrain::EmbeddingGrad",
               {{.name = "columns", .make = make_scatter, .inplace = {{3, 0}}},
                {.name = "ref", .make = make_scatter_ref, .inplace = {{3, 0}}}});
}

}  // namespace ortrain::cpu
