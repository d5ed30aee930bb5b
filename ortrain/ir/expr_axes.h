// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/ir/expr_program.h"

namespace ortrain {

// The space of an expression program with as few axes as its inputs allow: neighbouring axes along
// which every input steps on are one.
struct ExprAxes {
  Dims extents;               // outermost first; the last one is the columns
  std::vector<Dims> strides;  // per input and axis, in elements; 0 where the input is broadcast

  int64_t columns() const { return extents.back(); }
  int64_t rows() const { return num_elements(Dims(extents.begin(), extents.end() - 1)); }
};

// Whether rows mean something to the program, since it reduces them or has outputs with one value
// per row.
bool has_rows(const ExprProgram& program);

// `keep_columns`: the last axis stays one of its own. Throws ShapeError as expr_shape does.
ExprAxes merged_axes(const ExprProgram& program, const std::vector<Dims>& inputs,
                     bool keep_columns);

}  // namespace ortrain
