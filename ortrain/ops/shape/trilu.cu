// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/dim.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/words.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

struct Matrices {
  Divider rows, columns;
  bool upper;
};

template <int kSize, class Index>
__global__ void __launch_bounds__(kItemThreads)
    trilu(Matrices m, int64_t count, const int64_t* diagonal, const void* in_address,
          void* out_address) {
  using Word = typename WordOf<kSize>::type;
  const Word* in = static_cast<const Word*>(in_address);
  Word* out = static_cast<Word*>(out_address);
  // Beyond the matrix every k means the same.
  int64_t k = diagonal == nullptr ? 0 : *diagonal;
  k = k < -m.rows.divisor ? -m.rows.divisor : k > m.columns.divisor ? m.columns.divisor : k;
  for_each_item(count, [&](int64_t i) {
    const Index line = m.columns.divide(static_cast<Index>(i));
    const int64_t column = i - static_cast<int64_t>(line) * m.columns.divisor;
    const int64_t row =
        static_cast<int64_t>(line) - static_cast<int64_t>(m.rows.divide(line)) * m.rows.divisor;
    const bool keeps = m.upper ? column >= row + k : column <= row + k;
    out[i] = keeps ? in[i] : static_cast<Word>(0);
  });
}

KernelFn make_trilu(NodeSpec& spec) {
  const Dims& dims = spec.input(0).dims;
  const int64_t count = spec.input(0).numel();
  if (count == 0) return [](const KernelArgs&) {};
  const Matrices matrices{Divider(dims[dims.size() - 2]), Divider(dims.back()),
                          spec.attrs().int_("upper") != 0};
  return [=, has_k = spec.has_input(1),
          size = static_cast<int>(size_of(spec.input(0).dtype))](const KernelArgs& args) {
    dispatch_width(count, [&](auto index) {
      dispatch_word(size, [&](auto bytes) {
        constexpr int kSize = decltype(bytes)::value;
        if constexpr (kSize <= 8) {
          launch(trilu<kSize, decltype(index)>, items(count), args.stream, matrices, count,
                 has_k ? args.input<int64_t>(1) : nullptr, args.in[0], args.out[0]);
        }
      });
    });
  };
}

}  // namespace

void register_trilu(KernelRegistry& registry) {
  registry.add("Trilu", {{.name = "elements", .make = make_trilu, .inplace = {{0, 0}}}});
}

}  // namespace ortrain::gpu
