// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

KernelFn make_cast_each(NodeSpec& spec) {
  std::vector<int64_t> counts;
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    counts.push_back(spec.has_output(i) ? spec.input(i).numel() : 0);
  }
  const DType type = *dtype_from_onnx(spec.attrs().int_("to"));
  return dispatch_float(spec.input(0).dtype, [&](auto from) -> KernelFn {
    return dispatch_float(type, [&](auto to) -> KernelFn {
      using From = typename decltype(from)::type;
      using To = typename decltype(to)::type;
      return [counts](const KernelArgs& args) {
        for (size_t i = 0; i < counts.size(); ++i) {
          if (counts[i] == 0) continue;
          const From* x = args.input<From>(i);
          To* y = args.output<To>(i);
          parallel_for(counts[i], 4096, [&](int64_t begin, int64_t end) {
            for (int64_t k = begin; k < end; ++k) {
              y[k] = static_cast<To>(
                  static_cast<ComputeType<To>>(static_cast<ComputeType<From>>(x[k])));
            }
          });
        }
      };
    });
  });
}

}  // namespace

void register_cast_each(KernelRegistry& registry) {
  registry.add("ortrain::CastEach", {{.name = "ref", .make = make_cast_each}});
}

}  // namespace ortrain::cpu
