// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Expression programs with shapes and inputs, for tests of generated kernels and for the tool that
// compiles them for devices.

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/ir/expr_builder.h"
#include "ortrain/ir/expr_interpreter.h"
#include "ortrain/ir/node_program.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ops/elementwise/dropout_program.h"
#include "ortrain/ops/fused/fused_program.h"
#include "ortrain/testing/harness.h"

namespace ortrain::gpu {

struct ExprSample {
  std::string name;
  ExprProgram program;
  std::vector<Dims> dims;
  std::vector<TensorData> inputs;
  double tolerance = 0;  // of float32; 0: to the bit
};

inline Dims dims_of_output(const ExprSample& sample, size_t k) {
  std::vector<Shape> shapes;
  for (const Dims& dims : sample.dims) shapes.push_back(to_shape(dims));
  return to_dims(expr_output_shape(sample.program, expr_shape(sample.program, shapes), k));
}

// The programs that the operators' own cases make: of Fused, or of all the elementwise ones.
inline std::vector<ExprSample> case_samples(bool fused) {
  std::vector<ExprSample> samples;
  std::string name;
  const std::vector<TensorData>* inputs = nullptr;
  double tolerance = 0;
  const auto collector = [&](ProgramOfNode program_of) {
    Kernel kernel{.name = "collect"};
    kernel.make = [&, program_of](NodeSpec& spec) -> KernelFn {
      const ProgramOperands operands(spec);
      ExprSample sample{name, program_of(spec), operands.input_dims, {}, tolerance};
      for (const size_t i : operands.inputs) sample.inputs.push_back((*inputs)[i]);
      samples.push_back(std::move(sample));
      return [](const KernelArgs&) {};
    };
    return std::vector<Kernel>{kernel};
  };
  KernelRegistry registry;
  if (fused) {
    registry.add("ortrain::Fused", collector(ops::fused_program));
  } else {
    for (const OpDef* def : op_registry().all()) {
      if (!def->expression) continue;
      registry.add(def->domain.empty() ? def->name : def->domain + "::" + def->name,
                   collector(elementwise_program));
    }
    registry.add("Dropout", collector(ops::onnx_dropout_program));
  }
  const std::vector<std::string> known = registry.operators();
  for (const testing::OpCase& op_case : testing::all_cases().all()) {
    if (op_case.refusal || std::ranges::find(known, op_case.op) == known.end()) continue;
    for (const DType type : testing::types_under_test(op_case)) {
      const std::vector<TensorData> made = testing::make_inputs(op_case, type);
      inputs = &made;
      name = str(testing::case_name(op_case), " ", name_of(type));
      tolerance = op_case.tolerance;
      testing::run_kernel(op_case, made, "collect", registry);
    }
  }
  return samples;
}

// Draws programs over all operations, element types and patterns of broadcasting. What they compute
// does not depend on the order of additions: sums are of small integers.
class RandomPrograms {
 public:
  explicit RandomPrograms(uint32_t seed) : random_(seed) {}

  ExprSample draw(const Dims& dims, bool rows) {
    ExprBuilder builder;
    builder_ = &builder;
    registers_.clear();
    fixed_.clear();
    ExprSample sample{.name = str("random ", count_++, " ", dims_str(dims))};
    const int num_inputs = 1 + pick(4);
    std::vector<DType> types;
    for (int i = 0; i < num_inputs; ++i) {
      types.push_back(kTypes[static_cast<size_t>(pick(std::size(kTypes)))]);
      const bool per_row = rows && pick(4) == 0;
      sample.dims.push_back(i == 0 ? dims : broadcast_dims(dims, per_row));
      remember(builder.input(types.back(), i > 0 && per_row), false);
    }
    types.push_back(DType::i64);
    sample.dims.push_back(pick(2) == 0 ? Dims{} : Dims{1});
    const ExprReg seed = builder.input(DType::i64);
    for (const DType type : {DType::f32, DType::f64, DType::i32, DType::i64}) {
      remember(builder.constant(type, pick(7) - 3), true);
    }
    remember(builder.constant(DType::f32, pick(2) == 0 ? INFINITY : -NAN), true);
    const int steps = 8 + pick(20);
    for (int i = 0; i < steps; ++i) step(seed, rows);
    for (int i = 0; i < 3; ++i) {
      const ExprReg reg = registers_[registers_.size() - 1 - static_cast<size_t>(pick(12))];
      builder.output(reg, storage_of(builder.type(reg)));
    }
    if (!rows) {
      // An output needs the common shape then.
      builder.output(registers_[0], storage_of(builder.type(registers_[0])));
    }
    sample.program = builder.finish();
    if (!rows) drop_narrow_outputs(sample.program);
    for (size_t i = 0; i < types.size(); ++i)
      sample.inputs.push_back(fill(types[i], sample.dims[i]));
    return sample;
  }

 private:
  static constexpr DType kTypes[] = {DType::f32, DType::f32, DType::f64, DType::f16,    DType::bf16,
                                     DType::i8,  DType::i16, DType::i32, DType::i64,    DType::u8,
                                     DType::u16, DType::u32, DType::u64, DType::boolean};

  int pick(size_t count) { return static_cast<int>(random_() % count); }
  ExprReg any() { return registers_[static_cast<size_t>(pick(registers_.size()))]; }
  bool is_fixed(ExprReg reg) const { return std::ranges::find(fixed_, reg) != fixed_.end(); }
  void remember(ExprReg reg, bool fixed) {
    registers_.push_back(reg);
    if (fixed) fixed_.push_back(reg);
  }
  ExprReg as(ExprReg reg, DType type) { return builder_->cast(reg, type); }
  ExprReg any_of_type(DType type) {
    const ExprReg reg = any();
    const ExprReg cast = as(reg, type);
    if (is_fixed(reg)) fixed_.push_back(cast);
    return cast;
  }
  // Something that is no constant: compilers and libraries round functions of constants otherwise.
  ExprReg any_varying() {
    ExprReg reg = any();
    while (is_fixed(reg)) reg = any();
    return reg;
  }
  DType storage_of(DType type) {
    if (type != DType::f32) return type;
    return std::array{DType::f32, DType::f16, DType::bf16}[static_cast<size_t>(pick(3))];
  }

  Dims broadcast_dims(const Dims& dims, bool per_row) {
    Dims result = dims;
    for (int64_t& extent : result) {
      if (pick(3) == 0) extent = 1;
    }
    if (pick(4) == 0) result.assign(result.size(), 1);
    if (per_row && !result.empty()) result.back() = 1;
    if (pick(3) == 0 && !result.empty()) {
      result.erase(result.begin(), result.begin() + pick(result.size() + (per_row ? 0 : 1)));
    }
    return result;
  }

  void step(ExprReg seed, bool rows) {
    ExprBuilder& b = *builder_;
    const auto op = static_cast<ExprOp>(2 + pick(kExprOpCount - 2));
    const ExprOpInfo& info = expr_op_info(op);
    const auto number = [&](DType type) { return type == DType::boolean ? DType::i32 : type; };
    switch (info.typing) {
      case ExprTyping::number: {
        const ExprReg a = any_varying();
        const DType type = number(b.type(a));
        if (info.operands == 1) return remember(b.emit(op, {as(a, type)}), false);
        ExprReg right = any_of_type(type);
        const bool divides =
            op == ExprOp::div || op == ExprOp::fmod || op == ExprOp::mod || op == ExprOp::floor_div;
        if (divides && !is_float(type)) {
          // No zero: the lowest bit is set.
          right = b.emit(ExprOp::bit_or, {right, b.int_constant(type, 1)});
        } else if (op == ExprOp::pow && !is_float(type)) {
          right = b.emit(ExprOp::bit_and, {right, b.int_constant(type, 7)});
        }
        return remember(b.emit(op, {as(a, type), right}), false);
      }
      case ExprTyping::real: {
        const bool rounds = op == ExprOp::to_bf16 || op == ExprOp::to_f16;
        const DType type = rounds || pick(3) > 0 ? DType::f32 : DType::f64;
        return remember(b.emit(op, {as(any_varying(), type)}), false);
      }
      case ExprTyping::compare: {
        const ExprReg a = any_varying();
        return remember(b.emit(op, {a, any_of_type(b.type(a))}), false);
      }
      case ExprTyping::logic: {
        const ExprReg a = as(any_varying(), DType::boolean);
        if (info.operands == 1) return remember(b.emit(op, {a}), false);
        return remember(b.emit(op, {a, any_of_type(DType::boolean)}), false);
      }
      case ExprTyping::bits: {
        const ExprReg a = any_varying();
        const DType type = is_integer(b.type(a)) ? b.type(a) : DType::i32;
        if (info.operands == 1) return remember(b.emit(op, {as(a, type)}), false);
        return remember(b.emit(op, {as(a, type), any_of_type(type)}), false);
      }
      case ExprTyping::select: {
        const ExprReg a = any_varying();
        return remember(b.emit(op, {any_of_type(DType::boolean), a, any_of_type(b.type(a))}),
                        false);
      }
      case ExprTyping::special: {
        const DType to = kTypes[static_cast<size_t>(pick(std::size(kTypes)))];
        return remember(b.convert(any_varying(), to), false);
      }
      case ExprTyping::dropout: {
        const DType type = pick(2) == 0 ? DType::f32 : DType::f64;
        const ExprReg full = b.emit(ExprOp::add, {as(registers_[0], type), any_of_type(type)});
        return remember(b.dropout(full, seed, 0.25 * pick(5), pick(3)), false);
      }
      case ExprTyping::mask:
        return remember(b.dropout_mask(seed, 0.25 * pick(5), pick(3)), false);
      case ExprTyping::reduction: {
        if (!rows) return;
        // Small integers of the element type, different along the row.
        const DType type = number(b.type(any()));
        const ExprReg drawn = as(registers_[0], DType::i32);
        const ExprReg small = b.emit(
            ExprOp::add, {b.emit(ExprOp::bit_and, {drawn, b.int_constant(DType::i32, 15)}),
                          b.emit(ExprOp::bit_and,
                                 {as(any_varying(), DType::i32), b.int_constant(DType::i32, 3)})});
        // Integers have no mean here.
        const ExprOp reduced = op == ExprOp::row_mean && !is_float(type) ? ExprOp::row_sum : op;
        return remember(b.emit(reduced, {as(small, type)}), false);
      }
    }
  }

  static void drop_narrow_outputs(ExprProgram& program) {
    const std::vector<ExprExtent> extents = program.extents();
    std::erase_if(program.outputs, [&](const ExprOutput& output) {
      return extents[static_cast<size_t>(output.reg)] != ExprExtent::full;
    });
  }

  TensorData fill(DType type, const Dims& dims) {
    std::normal_distribution<double> normal(0.0, 3.0);
    void* data = nullptr;
    TensorData tensor = TensorData::allocate(type, dims, &data);
    dispatch_all(type, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (int64_t i = 0; i < tensor.numel(); ++i) {
        double value = normal(random_);
        if (pick(40) == 0) value = std::array{INFINITY, -INFINITY, NAN, 0.0f}[random_() % 4];
        if constexpr (std::is_integral_v<T>) {
          static_cast<T*>(data)[i] =
              static_cast<T>(random_() % 7 == 0 ? random_() : random_() % 16);
        } else {
          static_cast<T*>(data)[i] = static_cast<T>(static_cast<ComputeType<T>>(value));
        }
      }
    });
    return tensor;
  }

  std::mt19937 random_;
  ExprBuilder* builder_ = nullptr;
  std::vector<ExprReg> registers_;
  std::vector<ExprReg> fixed_;
  int count_ = 0;
};

inline std::vector<ExprSample> random_samples(int rounds) {
  RandomPrograms programs(7);
  std::vector<ExprSample> samples;
  for (int round = 0; round < rounds; ++round) {
    for (const Dims& dims : {Dims{5, 7}, Dims{2, 3, 64}, Dims{4, 1}, Dims{3, 5, 8}, Dims{1, 1},
                             Dims{0, 4}, Dims{3000}, Dims{2, 1, 3, 16}, Dims{}}) {
      samples.push_back(programs.draw(dims, false));
    }
    for (const Dims& dims : {Dims{5, 7}, Dims{6, 64}, Dims{4, 1}, Dims{2, 3, 600}, Dims{3, 2048},
                             Dims{2, 5, 33}, Dims{1, 9000}, Dims{1, 1}}) {
      samples.push_back(programs.draw(dims, true));
    }
  }
  return samples;
}

}  // namespace ortrain::gpu
