// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/expr_kernels.h"

#include <memory>
#include <utility>
#include <vector>

#include "ortrain/cpu/tile_program.h"
#include "ortrain/ir/expr_builder.h"
#include "ortrain/ir/expr_interpreter.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::cpu {
namespace {

// The operands of a program among those of its node: absent ones are skipped.
struct Wiring {
  std::vector<size_t> inputs;
  std::vector<size_t> outputs;
  std::vector<Dims> input_dims;

  size_t addresses() const { return inputs.size() + outputs.size(); }
  std::pair<const void* const*, void* const*> gather(const KernelArgs& args,
                                                     void** addresses) const {
    const void** in = const_cast<const void**>(addresses);
    void** out = addresses + inputs.size();
    for (size_t i = 0; i < inputs.size(); ++i) in[i] = args.in[inputs[i]];
    for (size_t i = 0; i < outputs.size(); ++i) out[i] = args.out[outputs[i]];
    return {in, out};
  }
};

Wiring wiring_of(const NodeSpec& spec) {
  Wiring wiring;
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    if (!spec.has_input(i)) continue;
    wiring.inputs.push_back(i);
    wiring.input_dims.push_back(spec.input(i).dims);
  }
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    if (spec.has_output(i)) wiring.outputs.push_back(i);
  }
  return wiring;
}

std::optional<double> scalar_of(const NodeSpec& spec, size_t i) {
  const void* data = spec.constant_input(i);
  if (data == nullptr || spec.input(i).numel() != 1) return std::nullopt;
  return TensorData(spec.input(i).dtype, spec.input(i).dims, data, nullptr).to_double();
}

// Executor is ExprInterpreter or TileProgram.
template <typename Executor>
KernelFn make_kernel(const ProgramOfNode& program_of, NodeSpec& spec) {
  const Wiring wiring = wiring_of(spec);
  auto executor = std::make_shared<const Executor>(program_of(spec), wiring.input_dims);
  const size_t scratch = executor->workspace_bytes();
  spec.request_workspace(scratch + wiring.addresses() * sizeof(void*));
  return [executor, wiring, scratch, context = spec.context()](const KernelArgs& args) {
    void** addresses = reinterpret_cast<void**>(static_cast<char*>(args.workspace) + scratch);
    const auto [in, out] = wiring.gather(args, addresses);
    with_context(context, [&] { executor->run(in, out, args.workspace); });
  };
}

// Equal bytes alone do not do: a broadcast input may have as many as a narrower output.
std::vector<std::pair<int, int>> equal_pairs(const NodeSpec& spec) {
  std::vector<std::pair<int, int>> pairs;
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    for (size_t k = 0; k < spec.num_outputs(); ++k) {
      if (!spec.has_input(i) || !spec.has_output(k) || spec.input(i) != spec.output(k)) continue;
      pairs.emplace_back(static_cast<int>(i), static_cast<int>(k));
    }
  }
  return pairs;
}

}  // namespace

ExprProgram elementwise_program(const NodeSpec& spec) {
  const OpDef& def = op_registry().get(spec.node().domain, spec.node().op);
  check(def.expression != nullptr, "the operator is not elementwise");
  ExprBuilder builder;
  std::vector<ExprEmitter::Operand> operands;
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    if (!spec.has_input(i)) {
      operands.emplace_back();
      continue;
    }
    const DType storage = spec.input(i).dtype;
    operands.push_back({builder.input(storage), storage, scalar_of(spec, i)});
  }
  const DType result = spec.output(0).dtype;
  ExprEmitter emitter(builder, def, spec.node(), std::move(operands), result);
  builder.output(def.expression(emitter), result);
  return builder.finish();
}

std::vector<Kernel> expr_kernels(ProgramOfNode program_of) {
  Kernel simd{.name = "simd"};
  simd.inplace_of = equal_pairs;
  simd.why_not = [program_of](const NodeSpec& spec) {
    return TileProgram::why_not(program_of(spec));
  };
  simd.make = [program_of](NodeSpec& spec) { return make_kernel<TileProgram>(program_of, spec); };
  Kernel ref{.name = "ref"};
  ref.inplace_of = equal_pairs;
  ref.make = [program_of](NodeSpec& spec) {
    return make_kernel<ExprInterpreter>(program_of, spec);
  };
  return {std::move(simd), std::move(ref)};
}

}  // namespace ortrain::cpu
