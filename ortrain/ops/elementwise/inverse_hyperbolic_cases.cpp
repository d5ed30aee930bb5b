// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

void add_shapes(CaseRegistry& cases, const std::string& op, const CaseInput& fill) {
  for (const Dims& dims : {Dims{}, Dims{0}, Dims{1}, Dims{7}, Dims{9}, Dims{3, 17}}) {
    CaseInput input = fill;
    input.dims = dims;
    std::string name = "shape";
    for (int64_t dim : dims) name += "_" + std::to_string(dim);
    cases.add({.op = op, .name = name, .inputs = {input}});
  }
}

}  // namespace

void register_inverse_hyperbolic(CaseRegistry& cases) {
  add_shapes(cases, "Asinh", CaseInput::normal({}));
  add_shapes(cases, "Acosh", CaseInput::uniform({}, 1.2, 9.0));
  add_shapes(cases, "Atanh", CaseInput::uniform({}, -0.9, 0.9));
  add_shapes(cases, "ortrain::Log1p", CaseInput::uniform({}, -0.5, 3.0));
  add_shapes(cases, "ortrain::Expm1", CaseInput::normal({}));
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const CaseInput special = CaseInput::literal(
      DType::undefined, {7},
      {std::numeric_limits<double>::quiet_NaN(), kInf, -kInf, 0.0, 1.0, -1.0, 1e15});
  for (const char* op : {"Asinh", "Acosh", "Atanh", "ortrain::Log1p", "ortrain::Expm1"}) {
    cases.add({.op = op, .name = "special", .inputs = {special}, .check_gradient = false});
  }
}

}  // namespace ortrain::testing
