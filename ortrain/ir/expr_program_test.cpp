// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expr_program.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "ortrain/base/error.h"
#include "ortrain/ir/expr_builder.h"
#include "ortrain/ir/expr_interpreter.h"
#include "ortrain/ir/expr_scalar.h"

namespace ortrain {
namespace {

TEST(ExprProgram, BuilderRefusesProgramsWithoutEnd) {
  ExprBuilder b;
  EXPECT_THROW(
      {
        for (int64_t i = 0; i < 5000; ++i) b.int_constant(DType::i64, i);
      },
      InvalidModelError);
}

TEST(ExprProgram, TextComesBack) {
  ExprBuilder b;
  const ExprReg x = b.input(DType::bf16);
  const ExprReg scale = b.constant(DType::f32, 0.1);
  const ExprReg seed = b.input(DType::i64);
  const ExprReg rows = b.input(DType::f32, true);
  const ExprReg y = b.dropout(b.emit(ExprOp::mul, {x, scale}), seed, 0.1, -7);
  const ExprReg mask = b.dropout_mask(seed, 0.1, -7);
  const ExprReg sum = b.emit(ExprOp::row_sum, {y});
  b.output(b.emit(ExprOp::select, {mask, b.emit(ExprOp::add, {sum, rows}), y}), DType::f16);
  b.output(sum, DType::f32);
  b.output(b.constant(DType::f32, -std::numeric_limits<double>::infinity()), DType::f32);
  b.output(b.int_constant(DType::i64, std::numeric_limits<int64_t>::min()), DType::i64);
  const ExprProgram program = b.finish();
  EXPECT_EQ(program.num_inputs(), 3u);
  const std::string text = program.text();
  EXPECT_EQ(ExprProgram::parse(text), program) << text;
  EXPECT_EQ(ExprProgram::parse(text).text(), text);
}

TEST(ExprProgram, BuilderSharesAndPrunes) {
  ExprBuilder b;
  const ExprReg x = b.input(DType::f32);
  const ExprReg unused = b.input(DType::f32);
  b.emit(ExprOp::exp, {unused});
  const ExprReg a = b.emit(ExprOp::add, {x, b.constant(DType::f32, 0.0)});
  EXPECT_EQ(a, b.emit(ExprOp::add, {x, b.constant(DType::f32, 0.0)}));
  EXPECT_NE(a, b.emit(ExprOp::add, {x, b.constant(DType::f32, -0.0)}));
  b.output(a, DType::f32);
  const ExprProgram program = b.finish();
  EXPECT_EQ(program.code.size(), 4u);  // two inputs, a constant, a sum
}

TEST(ExprProgram, RefusesHostileText) {
  const std::string deep_output = "expr 1\n%0 = input float32\noutput %0 float32\n";
  EXPECT_NO_THROW(ExprProgram::parse(deep_output));
  for (const char* text : {
           "",
           "expr 2\n",
           "expr 1\n",
           "expr 1\n%0 = input float32\n",
           "expr 1\n%0 = input float128\noutput %0 float32\n",
           "expr 1\n%1 = input float32\noutput %1 float32\n",
           "expr 1\n%0 = input float32\n%1 = exp float32 %1\noutput %1 float32\n",
           "expr 1\n%0 = input float32\n%1 = exp float32 %7\noutput %1 float32\n",
           "expr 1\n%0 = input float32\n%1 = exp float32 %-1\noutput %1 float32\n",
           "expr 1\n%0 = input float32\n%1 = exp float32\noutput %1 float32\n",
           "expr 1\n%0 = input float32\n%1 = exp float32 %0 %0\noutput %1 float32\n",
           "expr 1\n%0 = input float32\n%1 = exp float64 %0\noutput %1 float64\n",
           "expr 1\n%0 = input int64\n%1 = exp int64 %0\noutput %1 int64\n",
           "expr 1\n%0 = input float32\n%1 = exp bfloat16 %0\noutput %1 float32\n",
           "expr 1\n%0 = input float32\n%1 = and bool %0 %0\noutput %1 bool\n",
           "expr 1\n%0 = input float32\noutput %0 float64\n",
           "expr 1\n%0 = input float32\noutput %99999999999 float32\n",
           "expr 1\n%0 = input float32\noutput %5 float32\n",
           "expr 1\n%0 = constant float32 1.0x\noutput %0 float32\n",
           "expr 1\n%0 = constant float32\noutput %0 float32\n",
           "expr 1\n%0 = constant int32 1.5\noutput %0 int32\n",
           "expr 1\n%0 = constant float32 1\n%1 = input float32\noutput %1 float32\n",
           "expr 1\n%0 = input float32 per_row\n%1 = row_sum float32 %0\noutput %1 float32\n",
           "expr 1\n%0 = input float32\n%1 = input int64\n%2 = dropout float32 %0 %1 ratio 2 "
           "stream 0\noutput %2 float32\n",
           "expr 1\n%0 = input float32\n%1 = input int64\n%2 = dropout float32 %0 %1 ratio nan "
           "stream 0\noutput %2 float32\n",
           "expr 1\n%0 = input float32\n%1 = input int64\n%2 = add int64 %1 %1\n%3 = dropout "
           "float32 %0 %2 ratio 0.5 stream 0\noutput %3 float32\n",
           "expr 1\n%0 = input float32\noutput %0 float32\n%1 = exp float32 %0\n",
       }) {
    EXPECT_THROW(ExprProgram::parse(text), InvalidModelError) << text;
  }
  std::string long_text = "expr 1\n%0 = input float32\n";
  for (int i = 1; i < 5000; ++i) long_text += str("%", i, " = neg float32 %", i - 1, "\n");
  EXPECT_THROW(ExprProgram::parse(long_text + "output %4999 float32\n"), InvalidModelError);
}

TEST(ExprProgram, RefusesMutatedText) {
  ExprBuilder b;
  const ExprReg x = b.input(DType::f32);
  const ExprReg y = b.emit(ExprOp::mul, {x, b.constant(DType::f32, 0.5)});
  b.output(b.emit(ExprOp::sub, {y, b.emit(ExprOp::row_max, {y})}), DType::bf16);
  const std::string text = b.finish().text();
  std::mt19937 random(3);
  for (int round = 0; round < 3000; ++round) {
    std::string mutated = text;
    for (int k = 0; k < 3; ++k) {
      mutated[random() % mutated.size()] = static_cast<char>(random() % 256);
    }
    try {
      const ExprProgram program = ExprProgram::parse(mutated);
      EXPECT_NO_THROW(program.validate());
    } catch (const InvalidModelError&) {
    }
  }
}

TEST(ExprInterpreter, RefusesMeansOfIntegers) {
  for (const char* type : {"int32", "int64", "float32"}) {
    const auto make = [&] {
      return ExprInterpreter(ExprProgram::parse(str("expr 1\n%0 = input ", type, "\n%1 = row_mean ",
                                                    type, " %0\noutput %1 ", type, "\n")),
                             {{2, 4}});
    };
    if (std::string(type) == "float32") {
      EXPECT_NO_THROW(make());
    } else {
      EXPECT_THROW(make(), UnsupportedError) << type;
    }
  }
}

TEST(ExprScalar, IntegersWrapAndDivideAsDefined) {
  constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
  EXPECT_EQ(expr::div<int64_t>(kLowest, -1), kLowest);
  EXPECT_EQ(expr::fmod<int64_t>(kLowest, -1), 0);
  EXPECT_EQ(expr::neg<int64_t>(kLowest), kLowest);
  EXPECT_EQ(expr::add<int8_t>(127, 1), -128);
  EXPECT_EQ(expr::mul<uint16_t>(65535, 65535), 1);
  EXPECT_EQ(expr::div<int32_t>(-7, 2), -3);
  EXPECT_EQ(expr::floor_div<int32_t>(-7, 2), -4);
  EXPECT_EQ(expr::floor_div<int32_t>(7, -2), -4);
  EXPECT_EQ(expr::mod<int32_t>(-7, 2), 1);
  EXPECT_EQ(expr::mod<int32_t>(7, -2), -1);
  EXPECT_EQ(expr::fmod<int32_t>(-7, 2), -1);
  EXPECT_EQ(expr::floor_div<float>(-7.5f, 2.0f), -4.0f);
  EXPECT_TRUE(std::isinf(expr::floor_div<float>(1.0f, 0.0f)));
  EXPECT_EQ(expr::pow<int32_t>(-1, -3), -1);
  EXPECT_EQ(expr::pow<int32_t>(3, 4), 81);
  EXPECT_THROW(expr::div<int32_t>(1, 0), UnsupportedError);
  EXPECT_THROW(expr::mod<int64_t>(1, 0), UnsupportedError);
}

TEST(ExprScalar, CastsAreDefinedEverywhere) {
  EXPECT_EQ((expr::convert<int32_t>(3e9f)), std::numeric_limits<int32_t>::min());
  EXPECT_EQ((expr::convert<int64_t>(NAN)), std::numeric_limits<int64_t>::min());
  EXPECT_EQ((expr::convert<int32_t>(-2147483648.0)), std::numeric_limits<int32_t>::min());
  EXPECT_EQ((expr::convert<int32_t>(-1.9)), -1);
  EXPECT_EQ((expr::convert<uint8_t>(257.5f)), 1);
  EXPECT_EQ((expr::convert<uint64_t>(1.5e19)), 15000000000000000000u);
  EXPECT_EQ((expr::convert<bool>(NAN)), true);
  EXPECT_EQ((expr::convert<bool>(0.0f)), false);
}

TEST(ExprInterpreter, RunsRowsAndElements) {
  const ExprProgram program = ExprProgram::parse(
      "expr 1\n%0 = input float32\n%1 = input float32 per_row\n%2 = sub float32 %0 %1\n"
      "%3 = row_sum float32 %2\noutput %2 float32\noutput %3 float32\n");
  const ExprInterpreter interpreter(program, {{2, 3}, {2, 1}});
  const float x[] = {1, 2, 3, 4, 5, 6};
  const float rows[] = {1, 4};
  float difference[6];
  float sums[2];
  const void* inputs[] = {x, rows};
  void* outputs[] = {difference, sums};
  std::vector<uint64_t> workspace(interpreter.workspace_bytes().value() / 8 + 1);
  interpreter.run(inputs, outputs, workspace.data());
  EXPECT_EQ((std::vector<float>(difference, difference + 6)),
            (std::vector<float>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(sums[0], 3);
  EXPECT_EQ(sums[1], 3);
}

TEST(ExprInterpreter, ChecksShapes) {
  const ExprProgram program = ExprProgram::parse(
      "expr 1\n%0 = input float32\n%1 = input float32 per_row\n%2 = sub float32 %0 %1\n"
      "output %2 float32\n");
  EXPECT_THROW(ExprInterpreter(program, {{2, 3}, {2, 3}}), ShapeError);
  EXPECT_THROW(ExprInterpreter(program, {{2, 3}, {3, 1}}), ShapeError);
  EXPECT_THROW(ExprInterpreter(program, {{2, 3}}), InvalidModelError);
}

}  // namespace
}  // namespace ortrain
