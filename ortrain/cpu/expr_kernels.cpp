// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/expr_kernels.h"

#include <memory>
#include <utility>
#include <vector>

#include "ortrain/cpu/tile_program.h"
#include "ortrain/ir/expr_interpreter.h"

namespace ortrain::cpu {
namespace {

// Executor is ExprInterpreter or TileProgram.
template <typename Executor>
KernelFn make_kernel(const ProgramOfNode& program_of, NodeSpec& spec) {
  const ProgramOperands operands(spec);
  auto executor = std::make_shared<const Executor>(program_of(spec), operands.input_dims);
  const ByteCount buffers = executor->workspace_bytes();
  const size_t addresses = operands.inputs.size() + operands.outputs.size();
  spec.request_workspace(buffers + bytes_of<void*>(addresses));
  return [executor, operands, scratch = buffers.value(),
          context = spec.context()](const KernelArgs& args) {
    void** out = reinterpret_cast<void**>(static_cast<char*>(args.workspace) + scratch);
    const void** in = const_cast<const void**>(out + operands.outputs.size());
    for (size_t i = 0; i < operands.inputs.size(); ++i) in[i] = args.in[operands.inputs[i]];
    for (size_t i = 0; i < operands.outputs.size(); ++i) out[i] = args.out[operands.outputs[i]];
    with_context(context, [&] { executor->run(in, out, args.workspace); });
  };
}

}  // namespace

std::vector<Kernel> expr_kernels(ProgramOfNode program_of) {
  Kernel simd{.name = "simd"};
  simd.inplace_of = equal_operands;
  simd.why_not = [program_of](const NodeSpec& spec) {
    return TileProgram::why_not(program_of(spec));
  };
  simd.make = [program_of](NodeSpec& spec) { return make_kernel<TileProgram>(program_of, spec); };
  Kernel ref{.name = "ref"};
  ref.inplace_of = equal_operands;
  ref.make = [program_of](NodeSpec& spec) {
    return make_kernel<ExprInterpreter>(program_of, spec);
  };
  return {std::move(simd), std::move(ref)};
}

}  // namespace ortrain::cpu
