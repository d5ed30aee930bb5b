// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

void infer_embedding(InferContext& context) {
  const Shape& weight = context.shape(0);
  if (weight.empty()) throw ShapeError("'weight' is a scalar, it needs rows");
  Shape y = context.shape(1);
  y.insert(y.end(), weight.begin() + 1, weight.end());
  context.set_output(0, context.dtype(0), std::move(y));
}

void embedding_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  g.set_input_grad(0, g.own("EmbeddingGrad", {g.output_grad(0), g.input(1), g.shape_of(g.input(0))},
                            {{"padding_idx", g.attrs().int_("padding_idx")}}));
}

void infer_embedding_grad(InferContext& context) {
  const Shape& dy = context.shape(0);
  const Shape& indices = context.shape(1);
  const auto& known = context.known(2);
  if (!known) throw UnsupportedError("the shape of the table must be known before the run");
  const Shape table(known->begin(), known->end());
  if (table.empty() || dy.size() != indices.size() + table.size() - 1) {
    throw ShapeError(str("'dy' ", shape_str(dy), ", indices ", shape_str(indices),
                         " and a table of shape ", shape_str(table), " do not fit"));
  }
  for (size_t i = 0; i < dy.size(); ++i) {
    const Dim& wanted = i < indices.size() ? indices[i] : table[i - indices.size() + 1];
    if (dy[i] != wanted && dy[i].is_constant() && wanted.is_constant()) {
      throw ShapeError(str("'dy' ", shape_str(dy), ", indices ", shape_str(indices),
                           " and a table of shape ", shape_str(table), " do not fit"));
    }
  }
  if (context.has_input(3)) {
    const Shape& base = context.shape(3);
    if (is_constant(base) && is_constant(table) && base != table) {
      throw ShapeError(
          str("'base' has the shape ", shape_str(base), ", the table ", shape_str(table)));
    }
  }
  context.set_output(0, context.dtype(0), table);
}

// dw = base + scatter(dy): a gather of the incoming gradient, without the padding row.
void embedding_grad_gradient(GradContext& g) {
  const ValueId dw = g.output_grad(0);
  if (g.needs_grad(3)) g.set_input_grad(3, dw);
  if (!g.needs_grad(0)) return;
  ValueId rows = g.own("Embedding", {dw, g.input(1)});
  // No index of 32 bits is above their range.
  const int64_t most = g.dtype(g.input(1)) == DType::i32 ? INT32_MAX : INT64_MAX;
  if (const int64_t padding = g.attrs().int_("padding_idx"); padding >= 0 && padding <= most) {
    const ValueId row = g.constant(TensorData::int_scalar(g.dtype(g.input(1)), padding));
    ValueId is_padding = g.op("Equal", {g.input(1), row});
    for (int64_t i = g.rank(g.input(1)); i < g.rank(rows); ++i) {
      is_padding = g.unsqueeze(is_padding, {-1});
    }
    rows = g.where(is_padding, g.zeros_like(rows), rows);
  }
  g.set_input_grad(0, rows);
}

std::vector<ValueId> embedding_form(ExpandContext& e) {
  return {e.op("Gather", {e.input(0), e.input(1)})};
}

}  // namespace

void register_embedding(OpRegistry& registry) {
  registry.add({.name = "Embedding",
                .domain = std::string(kOrtrainDomain),
                .summary = "weight[indices]: rows of weight[V, ...]; an index outside of [0, V) is "
                           "an IndexError. The row padding_idx, if not negative, gets no gradient.",
                .inputs = {{"weight", "T"}, {"indices", "I"}},
                .outputs = {{"y", "T"}},
                .attrs = {{"padding_idx", int64_t{-1}}},
                .types = {{"T", kFloatTypes}, {"I", kIndexTypes}},
                .infer = infer_embedding,
                .gradient = embedding_gradient,
                .row_operand = 1,
                .looks_up = true,
                .standard_form = embedding_form});
  registry.add(
      {.name = "EmbeddingGrad",
       .domain = std::string(kOrtrainDomain),
       .summary = "base + the rows of dy added up at their indices, in a table of the given "
                  "shape; indices equal to padding_idx are skipped.",
       .inputs =
           {{"dy", "T"}, {"indices", "I"}, {"shape", "int64"}, {"base", "T", Arity::optional}},
       .outputs = {{"dweight", "T"}},
       .attrs = {{"padding_idx", int64_t{-1}}},
       .types = {{"T", kFloatTypes}, {"I", kIndexTypes}},
       .infer = infer_embedding_grad,
       .gradient = embedding_grad_gradient});
}

}  // namespace ortrain::ops
