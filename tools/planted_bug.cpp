// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Reads one element past its input: tools/run_sanitizers.py sees whether that is found.
#include <ortrain/extension/extension.h>

namespace ox = ortrain::extension;

ORTRAIN_EXTENSION(library) {
  library.add(ox::Operator("planted", "ReadsPastTheEnd")
                  .input("x", "T")
                  .output("y", "T")
                  .types("T", {ox::Type::f32})
                  .infer([](ox::Infer& node) { node.set_output(0, node.type(0), node.shape(0)); })
                  .kernel([](ox::Prepare& node) {
                    const int64_t n = node.input(0).numel();
                    return [n](const ox::Run& run) {
                      const volatile float* x = run.input<float>(0);
                      for (int64_t i = 0; i < n; ++i) run.output<float>(0)[i] = x[i + 1];
                    };
                  }));
}
