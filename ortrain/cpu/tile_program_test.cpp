// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/tile_program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <random>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/simd/for_each_target.h"
#include "ortrain/ir/expr_builder.h"
#include "ortrain/ir/expr_interpreter.h"
#include "ortrain/ir/tensor_data.h"

namespace ortrain::cpu {
namespace {

std::vector<TensorData> random_inputs(const ExprProgram& program, const std::vector<Dims>& dims) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  std::vector<TensorData> inputs;
  for (size_t i = 0; i < dims.size(); ++i) {
    void* data = nullptr;
    TensorData tensor = TensorData::allocate(program.code[i].dtype, dims[i], &data);
    dispatch_all(tensor.dtype(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (int64_t k = 0; k < tensor.numel(); ++k) {
        static_cast<T*>(data)[k] = static_cast<T>(static_cast<ComputeType<T>>(normal(random) * 3));
      }
    });
    inputs.push_back(std::move(tensor));
  }
  return inputs;
}

// Executor is TileProgram or ExprInterpreter.
template <typename Executor>
std::vector<TensorData> run(const Executor& executor, const ExprProgram& program,
                            const std::vector<TensorData>& inputs) {
  std::vector<Shape> shapes;
  std::vector<const void*> in;
  for (const TensorData& input : inputs) {
    shapes.push_back(to_shape(input.dims()));
    in.push_back(input.data());
  }
  const Shape full = expr_shape(program, shapes);
  std::vector<TensorData> outputs;
  std::vector<void*> out;
  for (size_t k = 0; k < program.outputs.size(); ++k) {
    void* data = nullptr;
    outputs.push_back(TensorData::allocate(program.outputs[k].dtype,
                                           to_dims(expr_output_shape(program, full, k)), &data));
    out.push_back(data);
  }
  void* workspace = nullptr;
  const TensorData owner = TensorData::allocate(
      DType::u8, {static_cast<int64_t>(executor.workspace_bytes().value())}, &workspace);
  executor.run(in.data(), out.data(), workspace);
  return outputs;
}

void expect_near(const TensorData& actual, const TensorData& expected, double tolerance) {
  dispatch_all(expected.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t i = 0; i < expected.numel(); ++i) {
      const double a = static_cast<double>(static_cast<ComputeType<T>>(actual.data_as<T>()[i]));
      const double e = static_cast<double>(static_cast<ComputeType<T>>(expected.data_as<T>()[i]));
      if (a == e || (std::isnan(a) && std::isnan(e))) continue;
      ASSERT_LE(std::abs(a - e), tolerance * std::max(1.0, std::abs(e))) << "element " << i;
    }
  });
}

// Every operation that has a loop, over vectors, scalars and rows, on one register type.
ExprProgram all_operations(DType storage) {
  ExprBuilder b;
  const ExprReg x = b.input(storage);
  const ExprReg y = b.input(storage);
  const ExprReg row = b.input(storage, true);
  const DType type = b.type(x);
  const ExprReg two = b.constant(type, 2.0);
  for (int i = 0; i < kExprOpCount; ++i) {
    const ExprOp op = static_cast<ExprOp>(i);
    const ExprOpInfo& info = expr_op_info(op);
    const bool divides =
        op == ExprOp::div || op == ExprOp::fmod || op == ExprOp::mod || op == ExprOp::floor_div;
    const bool rounds = op == ExprOp::to_bf16 || op == ExprOp::to_f16;
    std::vector<ExprReg> results;
    if (info.typing == ExprTyping::number || info.typing == ExprTyping::compare ||
        (info.typing == ExprTyping::real && is_float(type) && !(rounds && type != DType::f32))) {
      if (info.operands == 1) {
        results = {b.emit(op, {x}), b.emit(op, {row})};
      } else {
        // Integer divisors must not be zero; integer powers are of small exponents.
        const bool careful = (divides || op == ExprOp::pow) && !is_float(type);
        const ExprReg right = careful ? two : y;
        results = {b.emit(op, {x, right}), b.emit(op, {x, two}), b.emit(op, {row, two})};
        if (!careful) {
          results.push_back(b.emit(op, {two, x}));
          results.push_back(b.emit(op, {row, y}));
        }
      }
    } else if (info.typing == ExprTyping::bits && !is_float(type)) {
      if (info.operands == 1) {
        results = {b.emit(op, {x})};
      } else {
        results = {b.emit(op, {x, y}), b.emit(op, {x, row}), b.emit(op, {two, y})};
      }
    } else if (info.typing == ExprTyping::reduction && (op != ExprOp::row_mean || is_float(type))) {
      results = {b.emit(op, {x})};
    } else if (op == ExprOp::cast) {
      for (const DType to : {DType::f32, DType::f64, DType::i32, DType::i64, DType::boolean}) {
        b.output(b.cast(x, to), to);
      }
    } else if (op == ExprOp::select) {
      const ExprReg condition = b.emit(ExprOp::lt, {x, y});
      const ExprReg per_row = b.emit(ExprOp::lt, {row, two});
      results = {b.emit(op, {condition, x, y}),   b.emit(op, {condition, two, y}),
                 b.emit(op, {condition, x, two}), b.emit(op, {condition, row, two}),
                 b.emit(op, {per_row, x, y}),     b.emit(op, {per_row, two, y}),
                 b.emit(op, {per_row, x, two})};
      const ExprReg either = b.emit(ExprOp::logical_or, {condition, per_row});
      const ExprReg both = b.emit(ExprOp::logical_and, {condition, per_row});
      const ExprReg one = b.emit(ExprOp::logical_xor, {both, either});
      b.output(b.emit(ExprOp::logical_not, {one}), DType::boolean);
      b.output(b.emit(ExprOp::eq, {one, both}), DType::boolean);
    }
    for (const ExprReg result : results) {
      const DType out = b.type(result);
      b.output(result, out == DType::f32 ? storage : out);
    }
  }
  return b.finish();
}

TEST(TileProgram, AgreesWithTheInterpreterOnEveryTarget) {
  for (const DType type :
       {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i32, DType::i64}) {
    const ExprProgram program = all_operations(type);
    for (const Dims& dims :
         {Dims{3, 1}, Dims{5, 7}, Dims{2, 3, 600}, Dims{700, 3}, Dims{2, 2500}}) {
      Dims rows = dims;
      rows.back() = 1;
      const std::vector<Dims> shapes = {dims, {dims.back()}, rows};
      SCOPED_TRACE(str(name_of(type), " ", dims_str(dims)));
      const std::vector<TensorData> inputs = random_inputs(program, shapes);
      const auto expected = run(ExprInterpreter(program, shapes), program, inputs);
      ASSERT_EQ(TileProgram::why_not(program), std::nullopt);
      // 16-bit results may round to the neighbour; sums of rows are in another order.
      const double tolerance = type == DType::f64    ? 1e-11
                               : type == DType::bf16 ? 1e-2
                               : type == DType::f16  ? 2e-3
                                                     : 5e-5;
      for_each_target([&] {
        const auto actual = run(TileProgram(program, shapes), program, inputs);
        for (size_t k = 0; k < expected.size(); ++k) {
          SCOPED_TRACE(str("output ", k));
          expect_near(actual[k], expected[k], tolerance);
          if (testing::Test::HasFatalFailure()) return;
        }
      });
    }
  }
}

TEST(TileProgram, DoesNotDependOnTheNumberOfThreads) {
  const ExprProgram program = ExprProgram::parse(
      "expr 1\n%0 = input float32\n%1 = input float32\n%2 = input int64\n"
      "%3 = mul float32 %0 %1\n%4 = dropout float32 %3 %2 ratio 0.2 stream 1\n"
      "%5 = row_sum float32 %4\n%6 = exp float32 %5\n%7 = sub float32 %4 %6\n"
      "output %7 float32\noutput %5 float32\n");
  const std::vector<Dims> shapes = {{301, 333}, {333}, {}};
  const std::vector<TensorData> inputs = random_inputs(program, shapes);
  const int saved = omp_get_max_threads();
  std::vector<std::vector<TensorData>> results;
  for (const int threads : {1, 2, 5}) {
    omp_set_num_threads(threads);
    results.push_back(run(TileProgram(program, shapes), program, inputs));
  }
  omp_set_num_threads(saved);
  for (size_t k = 0; k < results[0].size(); ++k) {
    EXPECT_TRUE(results[0][k].equals(results[1][k]));
    EXPECT_TRUE(results[0][k].equals(results[2][k]));
  }
}

TEST(TileProgram, WritesOverItsInputs) {
  // Outputs 0 and 1 take the memory of inputs 0 and 1; both inputs are read by both.
  const ExprProgram program = ExprProgram::parse(
      "expr 1\n%0 = input float32\n%1 = input float32\n%2 = add float32 %0 %1\n"
      "%3 = mul float32 %0 %1\n%4 = sub float32 %2 %3\noutput %2 float32\noutput %4 float32\n");
  const ExprProgram swap = ExprProgram::parse(
      "expr 1\n%0 = input float32\n%1 = input float32\noutput %1 float32\noutput %0 float32\n");
  for (const ExprProgram& tested : {program, swap}) {
    const std::vector<Dims> shapes = {{3, 3001}, {3, 3001}};
    const std::vector<TensorData> inputs = random_inputs(tested, shapes);
    const TileProgram executor(tested, shapes);
    const auto expected = run(executor, tested, inputs);
    std::vector<char> a(inputs[0].bytes());
    std::vector<char> b(inputs[1].bytes());
    std::memcpy(a.data(), inputs[0].data(), a.size());
    std::memcpy(b.data(), inputs[1].data(), b.size());
    void* workspace = nullptr;
    const TensorData owner = TensorData::allocate(
        DType::u8, {static_cast<int64_t>(executor.workspace_bytes().value())}, &workspace);
    const void* in[] = {a.data(), b.data()};
    void* out[] = {a.data(), b.data()};
    executor.run(in, out, workspace);
    EXPECT_EQ(std::memcmp(a.data(), expected[0].data(), a.size()), 0);
    EXPECT_EQ(std::memcmp(b.data(), expected[1].data(), b.size()), 0);
  }
}

TEST(TileProgram, SaysWhyNot) {
  const ExprProgram program =
      ExprProgram::parse("expr 1\n%0 = input uint8\n%1 = neg uint8 %0\noutput %1 uint8\n");
  EXPECT_THAT(TileProgram::why_not(program).value_or(""), testing::HasSubstr("uint8"));
  const ExprProgram mean =
      ExprProgram::parse("expr 1\n%0 = input int32\n%1 = row_mean int32 %0\noutput %1 int32\n");
  EXPECT_THAT(TileProgram::why_not(mean).value_or(""), testing::HasSubstr("row_mean"));
}

}  // namespace
}  // namespace ortrain::cpu
