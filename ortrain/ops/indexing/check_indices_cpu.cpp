// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/error.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

KernelFn make_check_indices(NodeSpec& spec) {
  const int64_t count = spec.input(0).numel();
  return dispatch_index(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using I = typename decltype(tag)::type;
    return [count, context = spec.context(),
            message = spec.attrs().string_("message")](const KernelArgs& args) {
      const I* indices = args.input<I>(0);
      const int64_t extent = *args.input<int64_t>(1);
      const auto is_outside = [extent](I index) { return index < 0 || index >= extent; };
      const I* const found = std::find_if(indices, indices + count, is_outside);
      if (found != indices + count) {
        if (!message.empty()) throw IndexError(str(context, message));
        throw IndexError(str(context, "index ", *found, " at position ", found - indices,
                             " is outside of [0, ", extent, ")"));
      }
      I* out = args.output<I>(0);
      if (out != indices) std::copy_n(indices, count, out);
    };
  });
}

}  // namespace

void register_check_indices(KernelRegistry& registry);
void register_check_indices(KernelRegistry& registry) {
  registry.add("ortrain::CheckIndices",
               {{.name = "ref", .make = make_check_indices, .inplace = {{0, 0}}}});
}

}  // namespace ortrain::cpu
