// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// For outputs that must not share memory with the input.
KernelFn make_copy(NodeSpec& spec) {
  return [bytes = spec.output(0).bytes()](const KernelArgs& args) {
    if (bytes != 0) std::memmove(args.out[0], args.in[0], bytes);
  };
}

}  // namespace

void register_reshape(KernelRegistry& registry);
void register_reshape(KernelRegistry& registry) {
  for (const char* op : {"Reshape", "Flatten", "Squeeze", "Unsqueeze"}) {
    registry.add(op, {whole_input_view(),
                      {.name = "ref", .make = make_copy, .inplace = {{0, 0}}}});
  }
}

}  // namespace ortrain::cpu
