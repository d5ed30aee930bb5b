// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ops/layer_norm/norm_shapes.h"

namespace ortrain::ops {

DType statistics_type(DType type) { return type == DType::f64 ? DType::f64 : DType::f32; }

size_t normalized_axis(const AttributeReader& attrs, const Shape& x) {
  return static_cast<size_t>(normalize_axis(attrs.int_("axis"), x.size()));
}

void check_normalized_shape(const Shape& parameter, const Shape& x, size_t axis, const char* name) {
  const Shape wanted(x.begin() + static_cast<int64_t>(axis), x.end());
  Shape given = parameter;
  while (given.size() > wanted.size() && given.front().is(1)) given.erase(given.begin());
  bool fits = given.size() == wanted.size();
  for (size_t i = 0; fits && i < given.size(); ++i) {
    fits = given[i] == wanted[i] || !given[i].is_constant() || !wanted[i].is_constant();
  }
  if (!fits) {
    throw ShapeError(str("'", name, "' has the shape ", shape_str(parameter),
                         ", the normalized part is ", shape_str(wanted)));
  }
}

}  // namespace ortrain::ops
