// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// Row by row: zeros on one side of the diagonal, a copy of the other side.
KernelFn make_trilu(NodeSpec& spec) {
  const Dims& dims = spec.input(0).dims;
  const int64_t rows = dims[dims.size() - 2];
  const int64_t columns = dims.back();
  const int64_t size = static_cast<int64_t>(size_of(spec.input(0).dtype));
  const bool upper = spec.attrs().int_("upper") != 0;
  const bool has_k = spec.has_input(1);
  const int64_t total_rows = columns == 0 ? 0 : spec.input(0).numel() / columns;
  return [=](const KernelArgs& args) {
    // Beyond the matrix every k means the same.
    const int64_t k = has_k ? std::clamp(*args.input<int64_t>(1), -rows, columns) : 0;
    const std::byte* in = args.input<std::byte>(0);
    std::byte* out = args.output<std::byte>(0);
    const int64_t row_bytes = columns * size;
    parallel_for(total_rows, 65536 / std::max<int64_t>(row_bytes, 1) + 1,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t r = begin; r < end; ++r) {
                     // upper keeps columns >= row + k, lower those <= row + k
                     const int64_t diagonal = r % rows + k + (upper ? 0 : 1);
                     const int64_t split = std::clamp<int64_t>(diagonal, 0, columns) * size;
                     const int64_t keep = upper ? split : 0;
                     const int64_t kept = upper ? row_bytes - split : split;
                     const int64_t clear = upper ? 0 : split;
                     std::byte* row = out + r * row_bytes;
                     std::memmove(row + keep, in + r * row_bytes + keep,
                                  static_cast<size_t>(kept));
                     std::memset(row + clear, 0, static_cast<size_t>(row_bytes - kept));
                   }
                 });
  };
}

}  // namespace

void register_trilu(KernelRegistry& registry);
void register_trilu(KernelRegistry& registry) {
  registry.add("Trilu", {{.name = "ref", .make = make_trilu, .inplace = {{0, 0}}}});
}

}  // namespace ortrain::cpu
