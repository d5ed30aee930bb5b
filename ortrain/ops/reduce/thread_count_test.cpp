// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Results are the same bit by bit for any number of threads.
#include <gtest/gtest.h>
#include <omp.h>

#include "ortrain/testing/harness.h"

namespace ortrain::testing {
namespace {

using In = CaseInput;

std::vector<OpCase> cases() {
  std::vector<OpCase> result;
  const auto add = [&result](const char* op, const char* name, std::vector<In> inputs,
                             Attributes attributes = {}) {
    result.push_back({.op = op,
                      .name = name,
                      .inputs = std::move(inputs),
                      .attributes = std::move(attributes)});
  };
  add("ReduceSum", "all", {In::normal({300, 1001})});
  add("ReduceSum", "rows", {In::normal({300, 1001}), In::int64s({1})});
  add("ReduceSum", "columns", {In::normal({3000, 101}), In::int64s({0})});
  add("ReduceMean", "inner_blocks", {In::normal({90, 11, 7, 33}), In::int64s({0, 2})});
  add("ReduceProd", "columns", {In::uniform({200, 333}, 0.9, 1.1), In::int64s({0})});
  add("ReduceLogSumExp", "rows", {In::normal({200, 333}), In::int64s({1})});
  add("CumSum", "columns", {In::normal({500, 130}), In::int64s({0})});
  add("ortrain::GatherGrad", "rows",
      {In::normal({900, 70}), In::integers(DType::i64, {900}, 0, 30), In::int64s({30, 70})});
  add("ScatterElements", "add",
      {In::normal({50, 70}), In::integers(DType::i64, {900, 70}, 0, 50), In::normal({900, 70})},
      {{"reduction", std::string("add")}});
  add("ScatterND", "add",
      {In::normal({50, 170}), In::integers(DType::i64, {900, 1}, 0, 50), In::normal({900, 170})},
      {{"reduction", std::string("add")}});
  add("ortrain::BinCount", "bins", {In::normal({70000})}, {{"bins", int64_t{13}}});
  add("Transpose", "matrix", {In::normal({700, 900})});
  return result;
}

TEST(ThreadCount, DoesNotChangeResults) {
  const int threads = omp_get_max_threads();
  for (const OpCase& op_case : cases()) {
    for (DType type : {DType::f32, DType::bf16}) {
      const std::vector<TensorData> inputs = make_inputs(op_case, type);
      omp_set_num_threads(1);
      const std::vector<TensorData> expected = run_kernel(op_case, inputs, "", cpu_kernels());
      for (int count : {2, 3, 7}) {
        omp_set_num_threads(count);
        const std::vector<TensorData> actual = run_kernel(op_case, inputs, "", cpu_kernels());
        EXPECT_TRUE(actual[0].equals(expected[0])) << case_name(op_case) << " " << count;
      }
      omp_set_num_threads(threads);
    }
  }
}

}  // namespace
}  // namespace ortrain::testing
