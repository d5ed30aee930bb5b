// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/ir/attribute.h"

namespace ortrain::testing {

// How to fill one input of a case.
struct CaseInput {
  enum class Fill { normal, uniform, positive, integers, values, absent };

  // Element type. `undefined` = the type under test (each float type the operator claims).
  DType dtype = DType::undefined;
  Dims dims;
  Fill fill = Fill::normal;
  // uniform, integers: the range [low, high); positive: [0.5, 2).
  double low = -1.0;
  double high = 1.0;
  std::vector<double> values;  // for Fill::values

  static CaseInput normal(Dims dims) { return {.dims = std::move(dims)}; }
  static CaseInput positive(Dims dims) {
    return {.dims = std::move(dims), .fill = Fill::positive};
  }
  static CaseInput uniform(Dims dims, double low, double high) {
    return {.dims = std::move(dims), .fill = Fill::uniform, .low = low, .high = high};
  }
  // Integers of `dtype` (also boolean) drawn from [low, high).
  static CaseInput integers(DType dtype, Dims dims, int64_t low, int64_t high) {
    return {.dtype = dtype,
            .dims = std::move(dims),
            .fill = Fill::integers,
            .low = static_cast<double>(low),
            .high = static_cast<double>(high)};
  }
  // dtype undefined = the type under test.
  static CaseInput literal(DType dtype, Dims dims, std::vector<double> values) {
    return {.dtype = dtype,
            .dims = std::move(dims),
            .fill = Fill::values,
            .values = std::move(values)};
  }
  static CaseInput int64s(std::vector<int64_t> values) {
    return literal(DType::i64, {static_cast<int64_t>(values.size())},
                   std::vector<double>(values.begin(), values.end()));
  }
  static CaseInput none() { return {.fill = Fill::absent}; }
};

// One call of an operator that the harness checks: every kernel against "ref", "ref" against an
// outside reference (ONNX's reference implementation or PyTorch, from Python), gradients against
// finite differences in float64.
struct OpCase {
  std::string op;    // "Softmax", "ortrain::Attention"
  std::string name;  // what is special: "axis_0", "empty", "broadcast_rows"
  std::vector<CaseInput> inputs;
  Attributes attributes = {};
  size_t outputs = 1;
  // Element types to run with; empty = every float type that the schema claims for the first input
  // of the type under test.
  DTypeSet types = {};
  // false: no gradient check for this case (integer op, or a point where it is not smooth).
  bool check_gradient = true;
  // Largest allowed difference of a kernel from "ref", relative to max(1, |ref|), for f32.
  double tolerance = 2e-5;
  // Set: making or running it must throw an error whose text contains this.
  std::optional<std::string> refusal = std::nullopt;
  // Outputs that get a random gradient in the gradient check.
  std::vector<size_t> gradient_outputs = {0};
};

class CaseRegistry {
 public:
  void add(OpCase op_case) { cases_.push_back(std::move(op_case)); }
  const std::vector<OpCase>& all() const { return cases_; }

 private:
  std::vector<OpCase> cases_;
};

}  // namespace ortrain::testing

namespace ortrain {
// Generated at build time: calls every register_<stem> of ortrain/ops/*/*_cases.cpp.
void register_all_cases(testing::CaseRegistry& registry);
}  // namespace ortrain
