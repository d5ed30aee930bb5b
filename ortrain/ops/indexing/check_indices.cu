// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

template <class I>
__global__ void __launch_bounds__(kItemThreads)
    check_indices(int64_t count, const I* indices, const int64_t* extent, FaultReporter faults,
                  I* out) {
  for_each_item(count, [&](int64_t i) {
    const int64_t index = indices[i];
    if (index < 0 || index >= *extent) faults.report(FaultKind::index, index, i, 0, *extent);
    out[i] = indices[i];
  });
}

KernelFn make_check_indices(NodeSpec& spec) {
  const int64_t count = spec.input(0).numel();
  return dispatch_index(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using I = typename decltype(tag)::type;
    return [count](const KernelArgs& args) {
      if (count == 0) return;
      launch(check_indices<I>, items(count), args.stream, count, args.input<I>(0),
             args.input<int64_t>(1), FaultReporter(args), args.output<I>(0));
    };
  });
}

}  // namespace

void register_check_indices(KernelRegistry& registry);
void register_check_indices(KernelRegistry& registry) {
  registry.add("ortrain::CheckIndices",
               {{.name = "elements", .make = make_check_indices, .inplace = {{0, 0}}}});
}

}  // namespace ortrain::gpu
