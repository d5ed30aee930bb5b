// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expr_axes.h"

#include <algorithm>

#include "ortrain/ir/expr_interpreter.h"

namespace ortrain {

bool has_rows(const ExprProgram& program) {
  const std::vector<ExprExtent> extents = program.extents();
  return program.has_reductions() ||
         std::ranges::any_of(program.outputs, [&](const ExprOutput& output) {
           return extents[static_cast<size_t>(output.reg)] != ExprExtent::full;
         });
}

ExprAxes merged_axes(const ExprProgram& program, const std::vector<Dims>& inputs,
                     bool keep_columns) {
  std::vector<Shape> shapes;
  for (const Dims& input : inputs) shapes.push_back(to_shape(input));
  const Dims full = to_dims(expr_shape(program, shapes));
  std::vector<Dims> strides;
  for (const Dims& input : inputs) {
    const Dims own = strides_of(input);
    Dims spread(full.size(), 0);
    const size_t skipped = full.size() - input.size();
    for (size_t axis = 0; axis < input.size(); ++axis) {
      if (input[axis] != 1) spread[axis + skipped] = own[axis];
    }
    strides.push_back(std::move(spread));
  }

  // From the innermost axis outwards: an axis joins the one inside it if every input steps on.
  ExprAxes axes;
  axes.strides.resize(inputs.size());
  for (size_t axis = full.size(); axis-- > 0;) {
    const bool is_column = keep_columns && axes.extents.empty();
    if (full[axis] == 1 && !is_column) continue;
    bool joins = !axes.extents.empty() && !(keep_columns && axes.extents.size() == 1);
    for (size_t i = 0; joins && i < inputs.size(); ++i) {
      joins = strides[i][axis] == axes.strides[i].back() * axes.extents.back();
    }
    if (joins) {
      axes.extents.back() *= full[axis];
      continue;
    }
    axes.extents.push_back(full[axis]);
    for (size_t i = 0; i < inputs.size(); ++i) axes.strides[i].push_back(strides[i][axis]);
  }
  if (axes.extents.empty()) {
    axes.extents.push_back(1);
    for (Dims& dims : axes.strides) dims.push_back(0);
  }
  std::ranges::reverse(axes.extents);
  for (Dims& dims : axes.strides) std::ranges::reverse(dims);
  return axes;
}

}  // namespace ortrain
