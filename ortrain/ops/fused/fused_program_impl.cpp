// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/fused/fused_program.h"

namespace ortrain::ops {

ExprProgram fused_program(const NodeSpec& spec) {
  ExprProgram program = ExprProgram::parse(spec.attrs().string_("program"));
  std::vector<ExprOutput> wanted;
  for (size_t k = 0; k < program.outputs.size(); ++k) {
    if (spec.has_output(k)) wanted.push_back(program.outputs[k]);
  }
  program.outputs = std::move(wanted);
  return program;
}

}  // namespace ortrain::ops
