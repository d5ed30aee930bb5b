// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ortrain/ir/graph.h"
#include "ortrain/ir/tensor_data.h"
#include "ortrain/runtime/kernel_registry.h"
#include "ortrain/testing/case.h"

namespace ortrain::testing {

// All cases of all operators, filled on first use.
const CaseRegistry& all_cases();

// Domain and name.
std::pair<std::string, std::string> split_op(const std::string& op);
// "Softmax/axis_0"
std::string case_name(const OpCase& op_case);
// The same for GoogleTest, made unique by a number.
std::string test_name(const OpCase& op_case, size_t number);
// The element types to run the case with.
std::vector<DType> types_under_test(const OpCase& op_case);
// Deterministic inputs for a type under test; absent ones are undefined.
std::vector<TensorData> make_inputs(const OpCase& op_case, DType type, uint64_t seed = 1);
// A graph of the operator alone. Input i of the case is constant, or an input "x<i>" of the graph,
// whose gradient is wanted if it is of floats. The layer is the case's name.
Graph graph_of_case(const OpCase& op_case, const std::vector<TensorData>& inputs,
                    const std::function<bool(const TensorData&)>& is_constant);
// Runs one kernel, on memory of its device ("" = the one that would be chosen). Throws what
// inference and kernel throw, and UnsupportedError when that kernel refuses.
std::vector<TensorData> run_kernel(const OpCase& op_case, const std::vector<TensorData>& inputs,
                                   const std::string& kernel, const KernelRegistry& kernels);

struct CheckRow {
  std::string name;    // case
  std::string kernel;  // "" for refusal cases
  DType type = DType::undefined;
  bool passed = false;
  bool refused = false;   // the kernel does not take this case: no verdict
  double difference = 0;  // largest |kernel - ref| / max(1, |ref|)
  std::string message;    // what went wrong, or why refused
};

// Every kernel against the CPU's "ref" for every type under test; a refusal case: that it is
// refused.
std::vector<CheckRow> check_kernels(const OpCase& op_case, const KernelRegistry& kernels);

// The gradient rule, run through autodiff, plan and executor in float64: on the CPU against central
// differences, |a - n| <= 1e-5 + 1e-3 |n|; on another device against the gradients of the CPU,
// |a - c| <= 1e-9 max(1, |c|), which finds more than differences would and takes one step.
CheckRow check_gradient(const OpCase& op_case, const KernelRegistry& kernels);
// Whether check_gradient has something to check for this case.
bool has_gradient_check(const OpCase& op_case);

}  // namespace ortrain::testing
