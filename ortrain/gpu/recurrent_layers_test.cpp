// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ortrain/gpu/gpu_device.h"
#include "ortrain/testing/harness.h"

// Which recurrent layers run in one launch, and which step by step. Most values are checked by the
// cases of the operators.
namespace ortrain::testing {
namespace {

const OpCase& case_of(const std::string& op, const std::string& name) {
  for (const OpCase& op_case : all_cases().all()) {
    if (op_case.op == op && op_case.name == name) return op_case;
  }
  throw InvalidModelError("there is no case " + name + " of " + op);
}

// Why the kernel for a whole sequence does not take the case; empty: it does.
std::string refusal_of(const std::string& op, const std::string& name, DType type) {
  const OpCase& op_case = case_of(op, name);
  try {
    run_kernel(op_case, make_inputs(op_case, type), "sequence", gpu::kernels(0));
  } catch (const UnsupportedError& error) {
    return error.what();
  }
  return "";
}

class RecurrentLaunches : public ::testing::TestWithParam<std::string> {};

TEST_P(RecurrentLaunches, TakeWhatFitsABlockAndTheDevice) {
  const std::string op = GetParam();
  for (const DType type : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
    EXPECT_EQ(refusal_of(op, "odd", type), "");
    EXPECT_EQ(refusal_of(op, "empty_batch", type), "");
    EXPECT_NE(refusal_of(op, "no_steps", type).find("there are no steps"), std::string::npos);
    EXPECT_NE(refusal_of(op, "many_rows", type).find("a batch of 67 rows"), std::string::npos);
  }
}

// PyTorch, to which cases are compared too, has no such layers.
TEST_P(RecurrentLaunches, LayersWithoutInputsOrStates) {
  for (const int64_t divisor : {7, 9}) {  // of the input's and of the hidden size there
    OpCase op_case = case_of(GetParam(), "odd");
    for (CaseInput& input : op_case.inputs) {
      for (int64_t& extent : input.dims) {
        if (extent % divisor == 0) extent = 0;
      }
    }
    for (const CheckRow& row : check_kernels(op_case, gpu::kernels(0))) {
      EXPECT_TRUE(row.passed) << row.kernel << " " << name_of(row.type) << ": " << row.message;
    }
  }
}

TEST(RecurrentLaunch, WeightsOfWideLayersDoNotFit) {
  for (const std::string op : {"ortrain::LSTM", "ortrain::LSTMGrad"}) {
    const std::string why = refusal_of(op, "wide", DType::f32);
    EXPECT_NE(why.find("a hidden size of 131 takes"), std::string::npos) << why;
    EXPECT_EQ(refusal_of(op, "wide", DType::bf16), "");
  }
  EXPECT_EQ(refusal_of("ortrain::RNN", "wide", DType::f32), "");
}

INSTANTIATE_TEST_SUITE_P(Ops, RecurrentLaunches,
                         ::testing::Values("ortrain::LSTM", "ortrain::LSTMGrad", "ortrain::GRU",
                                           "ortrain::GRUGrad", "ortrain::RNN", "ortrain::RNNGrad"),
                         [](const auto& info) { return info.param.substr(9); });

}  // namespace
}  // namespace ortrain::testing
