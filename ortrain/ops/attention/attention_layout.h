// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/base/dim.h"
#include "ortrain/ir/attribute_reader.h"

namespace ortrain::ops {

// The extents of attention, read from operands of four dimensions [batch, heads, rows, dim] or of
// three, [batch, rows, heads * dim], when the attribute q_num_heads says how many heads there are.
struct AttentionExtents {
  Dim batch, heads, kv_heads, queries, keys, head_dim, value_dim;

  bool packed = false;  // three dimensions
  // Throws ShapeError or InvalidModelError.
  AttentionExtents(const AttributeReader& attrs, const Shape& q, const Shape& k, const Shape& v);

  Shape output() const;     // out, like q with the rows of v
  Shape logsumexp() const;  // [batch, heads, queries]
  Shape scores() const;     // [batch, heads, queries, keys]
};

// 1 / sqrt(head_dim) unless the attribute is given.
double attention_scale(const AttributeReader& attrs, int64_t head_dim);

}  // namespace ortrain::ops
