// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/expr_kernels.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/base/log.h"
#include "ortrain/gpu/expr_kernel_plan.h"
#include "ortrain/gpu/expr_source.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/interpreted_program.h"
#include "ortrain/gpu/runtime_compiler.h"

namespace ortrain::gpu {
namespace {

// The addresses of one run, on the stack of its thread.
struct OperandAddresses {
  OperandAddresses(const ProgramOperands& operands, const KernelArgs& args) {
    for (size_t i = 0; i < operands.inputs.size(); ++i) in[i] = args.in[operands.inputs[i]];
    for (size_t k = 0; k < operands.outputs.size(); ++k) out[k] = args.out[operands.outputs[k]];
  }
  const void* in[kMostArgumentWords];
  void* out[kMostArgumentWords];
};

int index_of(const Device& searched) {
  for (int i = 0; i < device_count(); ++i) {
    if (&device(i) == &searched) return i;
  }
  throw InternalError("kernels for a device of another provider");
}

// Whether `result` is computed from input `i`, directly or through other registers.
bool comes_from(const ExprProgram& program, ExprReg result, size_t i) {
  std::vector<bool> of_input(program.code.size(), false);
  of_input[i] = true;
  for (size_t reg = i + 1; reg < program.code.size(); ++reg) {
    const ExprInstruction& instruction = program.code[reg];
    for (int k = 0; k < expr_op_info(instruction.op).operands; ++k) {
      if (of_input[static_cast<size_t>(instruction.operands[static_cast<size_t>(k)])]) {
        of_input[reg] = true;
      }
    }
  }
  return of_input[static_cast<size_t>(result)];
}

// Equal operands that one thread reads and writes. Values per row are read by all threads of a row,
// single ones by all of the kernel. A result that waits for nothing of the input is stored while
// its elements are still on their way: right, but a store to a line that is being loaded cost such
// a kernel 2.3 to 3.9 times its time on an H100 (docs/gpu.md).
std::vector<std::pair<int, int>> inplace_pairs(const ProgramOfNode& program_of,
                                               const NodeSpec& spec) {
  std::vector<std::pair<int, int>> pairs = equal_operands(spec);
  if (pairs.empty()) return pairs;
  const ExprProgram program = program_of(spec);
  const std::vector<ExprExtent> extents = program.extents();
  const ProgramOperands operands(spec);
  const auto place = [](const std::vector<size_t>& list, int operand) {
    return static_cast<size_t>(std::ranges::find(list, static_cast<size_t>(operand)) -
                               list.begin());
  };
  std::erase_if(pairs, [&](const std::pair<int, int>& pair) {
    const TensorSpec& shared = spec.output(static_cast<size_t>(pair.second));
    const ExprReg result = program.outputs[place(operands.outputs, pair.second)].reg;
    if (extents[static_cast<size_t>(result)] != ExprExtent::full || shared.numel() == 1)
      return true;
    for (size_t i = 0; i < operands.inputs.size(); ++i) {
      if (program.code[i].per_row && spec.input(operands.inputs[i]) == shared) return true;
    }
    return !comes_from(program, result, place(operands.inputs, pair.first));
  });
  return pairs;
}

// Whether the maximum or minimum of a row without elements is asked for.
bool lacks_elements(const ExprProgram& program, const ExprAxes& axes) {
  return axes.columns() == 0 && axes.rows() > 0 &&
         std::ranges::any_of(program.code, [](const ExprInstruction& instruction) {
           return instruction.op == ExprOp::row_max || instruction.op == ExprOp::row_min;
         });
}

[[noreturn]] void throw_no_elements() {
  throw ShapeError("the maximum or minimum of an empty row does not exist");
}

KernelFn make_interpreted(const ProgramOfNode& program_of, NodeSpec& spec, Device& device) {
  const ProgramOperands operands(spec);
  const ExprProgram program = program_of(spec);
  bool rows = false;
  const bool fails = lacks_elements(program, device_axes(program, operands.input_dims, rows));
  auto interpreted =
      std::make_shared<const InterpretedProgram>(program, operands.input_dims, device);
  return [interpreted, operands, fails, context = spec.context()](const KernelArgs& args) {
    if (fails) with_context(context, throw_no_elements);
    const OperandAddresses addresses(operands, args);
    interpreted->run(addresses.in, addresses.out, args);
  };
}

// One kernel of a node: compiled when it is asked for, replaced by the interpreter if that fails.
class GeneratedKernel {
 public:
  GeneratedKernel(const ExprProgram& program, const std::vector<Dims>& inputs, bool vectors)
      : plan_(program, inputs, vectors) {}

  const ExprKernelPlan& plan() const { return plan_; }

  void start(const SourceCompiler& compiler) {
    if (PlanningForSizes::is_on()) return;
    const ExprSource source = print_source(plan_);
    job_ = compile_kernel(compiler, str(expr_prelude(), source.text), source.entry);
  }

  // Waits for the compiler the first time.
  void run(const OperandAddresses& addresses, const KernelArgs& args,
           const std::function<std::shared_ptr<const InterpretedProgram>()>& instead) {
    std::call_once(once_, [&] {
      try {
        const CompiledKernel& compiled = job_.get();
        kernel_ = compiled.kernel;
        for (const std::string& note : compiled.notes) log_line("dispatch", note);
      } catch (const Error& error) {
        log_line("dispatch", str("a fused node is interpreted: ", error.what()));
        interpreted_ = instead();
      }
    });
    if (interpreted_) return interpreted_->run(addresses.in, addresses.out, args);
    uint64_t words[kMostArgumentWords];
    plan_.write_arguments(addresses.in, addresses.out, args.fault, args.step, words);
    if (plan_.blocks() == 0) return;
    kernel_->launch(plan_.blocks(), plan_.threads(), args.stream, words);
  }

 private:
  ExprKernelPlan plan_;
  KernelJob job_;
  std::once_flag once_;
  std::shared_ptr<const LoadedKernel> kernel_;
  std::shared_ptr<const InterpretedProgram> interpreted_;
};

struct GeneratedNode {
  ProgramOperands operands;
  ExprProgram program;
  const SourceCompiler* compiler;
  Device* device;
  GeneratedKernel vectors;
  // For operands that are not aligned; compiled when they come.
  std::once_flag once;
  std::unique_ptr<GeneratedKernel> elements;

  GeneratedKernel& kernel_for(const OperandAddresses& addresses) {
    if (vectors.plan().takes(addresses.in, addresses.out)) return vectors;
    std::call_once(once, [this] {
      auto made = std::make_unique<GeneratedKernel>(program, operands.input_dims, false);
      made->start(*compiler);
      elements = std::move(made);
    });
    return *elements;
  }
  std::shared_ptr<const InterpretedProgram> interpret() const {
    const std::optional<std::string> why =
        InterpretedProgram::why_not(program, operands.input_dims);
    if (why) throw UnsupportedError(*why);
    return std::make_shared<const InterpretedProgram>(program, operands.input_dims, *device);
  }
};

KernelFn make_generated(const ProgramOfNode& program_of, NodeSpec& spec, Device& device) {
  const ProgramOperands operands(spec);
  const ExprProgram program = program_of(spec);
  std::string why;
  const SourceCompiler* compiler = source_compiler(index_of(device), &why);
  if (compiler == nullptr) throw UnsupportedError(str(spec.context(), why));
  std::shared_ptr<GeneratedNode> node(
      new GeneratedNode{.operands = operands,
                        .program = program,
                        .compiler = compiler,
                        .device = &device,
                        .vectors = GeneratedKernel(program, operands.input_dims, true)});
  const bool fails = lacks_elements(program, node->vectors.plan().axes());
  node->vectors.start(*compiler);
  return [node, fails, context = spec.context()](const KernelArgs& args) {
    with_context(context, [&] {
      if (fails) throw_no_elements();
      const OperandAddresses addresses(node->operands, args);
      node->kernel_for(addresses).run(addresses, args, [&] { return node->interpret(); });
    });
  };
}

}  // namespace

std::vector<Kernel> expr_kernels(ProgramOfNode program_of, Device& device) {
  const auto pairs = [program_of](const NodeSpec& spec) { return inplace_pairs(program_of, spec); };
  Kernel generated{.name = "generated"};
  generated.inplace_of = pairs;
  generated.why_not = [program_of, &device](const NodeSpec& spec) -> std::optional<std::string> {
    std::string why;
    if (source_compiler(index_of(device), &why) == nullptr) return why;
    return ExprKernelPlan::why_not(program_of(spec), ProgramOperands(spec).input_dims);
  };
  generated.make = [program_of, &device](NodeSpec& spec) {
    return make_generated(program_of, spec, device);
  };
  Kernel interpreted{.name = "interpreted"};
  interpreted.inplace_of = pairs;
  interpreted.why_not = [program_of](const NodeSpec& spec) {
    return InterpretedProgram::why_not(program_of(spec), ProgramOperands(spec).input_dims);
  };
  interpreted.make = [program_of, &device](NodeSpec& spec) {
    return make_interpreted(program_of, spec, device);
  };
  return {std::move(generated), std::move(interpreted)};
}

}  // namespace ortrain::gpu
