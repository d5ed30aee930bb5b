// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ortrain/base/error.h"
#include "ortrain/ops/attention/attention_layout.h"

namespace ortrain::ops {
namespace {

void check_equal(const Dim& a, const Dim& b, const char* what, const Shape& q, const Shape& k,
                 const Shape& v) {
  if (a == b || !a.is_constant() || !b.is_constant()) return;
  throw ShapeError(str(what, " differ: ", a.str(), " and ", b.str(), " of q ", shape_str(q), ", k ",
                       shape_str(k), ", v ", shape_str(v)));
}

// The part of a packed row that one head has.
Dim per_head(const Dim& width, int64_t heads, const char* name) {
  if (width.is_constant() && width.constant() % heads != 0) {
    throw ShapeError(str("the last extent of '", name, "', ", width.str(), ", is no multiple of ",
                         heads, " heads"));
  }
  return floor_div(width, Dim(heads));
}

}  // namespace

AttentionExtents::AttentionExtents(const AttributeReader& attrs, const Shape& q, const Shape& k,
                                   const Shape& v) {
  const int64_t q_heads = attrs.int_("q_num_heads");
  const int64_t kv = attrs.int_("kv_num_heads");
  if (q.size() != k.size() || q.size() != v.size() || (q.size() != 4 && q.size() != 3)) {
    throw ShapeError(str("q, k and v must all have four or all three dimensions, are ",
                         shape_str(q), ", ", shape_str(k), ", ", shape_str(v)));
  }
  packed = q.size() == 3;
  if (packed && q_heads < 1) {
    throw InvalidModelError("operands of three dimensions need the attribute q_num_heads");
  }
  batch = q[0];
  check_equal(k[0], batch, "batch extents", q, k, v);
  check_equal(v[0], batch, "batch extents", q, k, v);
  if (packed) {
    heads = Dim(q_heads);
    const int64_t key_heads = kv > 0 ? kv : q_heads;
    kv_heads = Dim(key_heads);
    queries = q[1];
    keys = k[1];
    check_equal(v[1], keys, "rows of k and v", q, k, v);
    head_dim = per_head(q[2], q_heads, "q");
    value_dim = per_head(v[2], key_heads, "v");
    check_equal(per_head(k[2], key_heads, "k"), head_dim, "head sizes of q and k", q, k, v);
  } else {
    heads = q[1];
    kv_heads = k[1];
    queries = q[2];
    keys = k[2];
    head_dim = q[3];
    value_dim = v[3];
    check_equal(v[1], kv_heads, "heads of k and v", q, k, v);
    check_equal(v[2], keys, "rows of k and v", q, k, v);
    check_equal(k[3], head_dim, "head sizes of q and k", q, k, v);
  }
  if (heads.is_constant() && kv_heads.is_constant() &&
      (kv_heads.constant() < 1 || heads.constant() % kv_heads.constant() != 0) &&
      heads.constant() != 0) {
    throw ShapeError(
        str(heads.str(), " query heads cannot share ", kv_heads.str(), " key heads evenly"));
  }
}

Shape AttentionExtents::output() const {
  if (packed) return {batch, queries, heads * value_dim};
  return {batch, heads, queries, value_dim};
}

Shape AttentionExtents::logsumexp() const { return {batch, heads, queries}; }

Shape AttentionExtents::scores() const { return {batch, heads, queries, keys}; }

double attention_scale(const AttributeReader& attrs, int64_t head_dim) {
  if (attrs.has("scale")) return attrs.float_("scale");
  return head_dim > 0 ? 1.0 / std::sqrt(static_cast<double>(head_dim)) : 1.0;
}

}  // namespace ortrain::ops
