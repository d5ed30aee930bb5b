// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

std::vector<int64_t> permutation(const AttributeReader& attrs, size_t rank) {
  std::optional<std::vector<int64_t>> perm = attrs.optional_ints("perm");
  if (!perm) {
    std::vector<int64_t> reversed(rank);
    std::iota(reversed.rbegin(), reversed.rend(), 0);
    return reversed;
  }
  std::vector<int64_t> sorted = *perm;
  std::sort(sorted.begin(), sorted.end());
  std::vector<int64_t> expected(rank);
  std::iota(expected.begin(), expected.end(), 0);
  if (sorted != expected) {
    throw ShapeError(
        str("perm ", dims_str(*perm), " is no permutation of the axes of rank ", rank));
  }
  return *perm;
}

void infer_transpose(InferContext& context) {
  Shape shape;
  for (int64_t axis : permutation(context.attrs(), context.shape(0).size())) {
    shape.push_back(context.shape(0)[static_cast<size_t>(axis)]);
  }
  const bool keeps_contents = context.known(0).has_value();
  context.set_output(0, context.dtype(0), std::move(shape));
  if (keeps_contents) context.set_known(0, *context.known(0));
}

void transpose_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const std::vector<int64_t> perm = permutation(g.attrs(), g.shape(g.input(0)).size());
  std::vector<int64_t> inverse(perm.size());
  for (size_t i = 0; i < perm.size(); ++i) {
    inverse[static_cast<size_t>(perm[i])] = static_cast<int64_t>(i);
  }
  g.set_input_grad(0, g.transpose(g.output_grad(0), inverse));
}

}  // namespace

void register_transpose(OpRegistry& registry);
void register_transpose(OpRegistry& registry) {
  registry.add({.name = "Transpose",
                .since = 1,
                .summary = "Permutes the axes; without perm it reverses them.",
                .inputs = {{"data", "T"}},
                .outputs = {{"transposed", "T"}},
                .attrs = {{"perm", AttributeKind::ints}},
                .types = {{"T", kAllTypes}},
                .infer = infer_transpose,
                .gradient = transpose_gradient});
}

}  // namespace ortrain::ops
