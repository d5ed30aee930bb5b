// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/flops.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/ops/attention/attention_layout.h"

namespace ortrain::ops {
namespace {

DType logsumexp_type(DType type) { return type == DType::f64 ? DType::f64 : DType::f32; }

// Checks mask, seed and offsets at inputs `mask` and the two behind it.
void check_options(const InferContext& context, const AttentionExtents& extents, size_t mask) {
  const double dropout = context.attrs().float_("dropout");
  if (!(dropout >= 0.0 && dropout <= 1.0)) {
    throw InvalidModelError(str("attribute 'dropout' is ", dropout, ", outside of [0, 1]"));
  }
  if (dropout > 0.0 && !context.has_input(mask + 1)) {
    throw InvalidModelError("dropout needs the input 'seed'");
  }
  if (context.has_input(mask + 1) && context.rank(mask + 1) != 0) {
    throw ShapeError(str("'seed' is a scalar, has the shape ", shape_str(context.shape(mask + 1))));
  }
  if (context.has_input(mask + 2)) {
    const bool one_entry = extents.packed && extents.batch.is(1) && extents.queries == extents.keys;
    if (!one_entry || context.has_input(mask)) {
      throw InvalidModelError(
          "'offsets' needs q, k and v of shape [1, rows, heads * dim], the same rows and no mask");
    }
    if (context.rank(mask + 2) != 1 || context.shape(mask + 2)[0].is(0)) {
      throw ShapeError(str("'offsets' has the shape ", shape_str(context.shape(mask + 2)),
                           ", expected one entry more than there are sequences"));
    }
  }
  if (!context.has_input(mask)) return;
  if (context.dtype(mask) != DType::boolean && context.dtype(mask) != context.dtype(0)) {
    throw DTypeError(str("'mask' is ", name_of(context.dtype(mask)), ", expected bool or ",
                         name_of(context.dtype(0))));
  }
  const Shape& shape = context.shape(mask);
  const Shape scores = extents.scores();
  bool fits = shape.size() <= scores.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    const Dim& wanted = scores[scores.size() - shape.size() + i];
    fits = shape[i] == wanted || shape[i].is(1) || !shape[i].is_constant() || !wanted.is_constant();
  }
  if (!fits) {
    throw ShapeError(
        str("'mask' of shape ", shape_str(shape), " does not broadcast to ", shape_str(scores)));
  }
}

// Kernels count scores, which few of them hold, and their sums; heads without columns make any
// number of both.
void check_sizes(const AttentionExtents& extents) {
  Dim scores(1);
  for (const Dim& extent : extents.scores()) {
    if (extent.is_constant()) scores = checked_mul(scores, std::max<int64_t>(extent.constant(), 1));
  }
  check_extents(extents.logsumexp(), sizeof(double));
}

void infer_attention(InferContext& context) {
  const AttentionExtents extents(context.attrs(), context.shape(0), context.shape(1),
                                 context.shape(2));
  check_sizes(extents);
  check_options(context, extents, 3);
  context.set_output(0, context.dtype(0), extents.output());
  context.set_output(1, logsumexp_type(context.dtype(0)), extents.logsumexp());
}

Attributes options_of(const AttributeReader& attrs) {
  Attributes options{{"is_causal", attrs.int_("is_causal")},
                     {"dropout", attrs.float_("dropout")},
                     {"stream", attrs.int_("stream")},
                     {"q_num_heads", attrs.int_("q_num_heads")},
                     {"kv_num_heads", attrs.int_("kv_num_heads")}};
  if (attrs.has("scale")) options["scale"] = attrs.float_("scale");
  return options;
}

void attention_gradient(GradContext& g) {
  if (g.has_output_grad(1)) {
    throw UnsupportedError(
        str(Graph::context(g.node()), "the gradient of 'logsumexp' is not supported"));
  }
  if (!g.has_output_grad(0)) return;
  const std::vector<bool> wanted{g.needs_grad(0), g.needs_grad(1), g.needs_grad(2),
                                 g.needs_grad(3)};
  const std::vector<ValueId> grads =
      g.GraphBuilder::node(kOrtrainDomain, "AttentionGrad",
                           {g.output_grad(0), g.input(0), g.input(1), g.input(2), g.output(0),
                            g.output(1), g.input(3), g.input(4), g.input(5)},
                           options_of(g.attrs()), wanted);
  for (size_t i = 0; i < grads.size(); ++i) {
    if (wanted[i]) g.set_input_grad(i, grads[i]);
  }
}

void infer_attention_grad(InferContext& context) {
  const AttentionExtents extents(context.attrs(), context.shape(1), context.shape(2),
                                 context.shape(3));
  check_sizes(extents);
  check_options(context, extents, 6);
  for (const size_t i : {0, 4}) check_input_shape(context, i, extents.output());
  check_input_shape(context, 5, extents.logsumexp());
  if (context.dtype(5) != logsumexp_type(context.dtype(0))) {
    throw DTypeError(str("'logsumexp' is ", name_of(context.dtype(5))));
  }
  for (size_t i = 0; i < 3; ++i) context.set_output(i, context.dtype(0), context.shape(i + 1));
  if (context.wants_output(3)) {
    if (!context.has_input(6) || context.dtype(6) == DType::boolean) {
      throw InvalidModelError("'dmask' needs a float 'mask'");
    }
    context.set_output(3, context.dtype(6), context.shape(6));
  }
}

const std::vector<FormalAttribute> kOptions = {
    {"scale", AttributeKind::float_}, {"is_causal", int64_t{0}},   {"dropout", 0.0},
    {"stream", int64_t{0}},           {"q_num_heads", int64_t{0}}, {"kv_num_heads", int64_t{0}}};

const std::map<std::string, DTypeSet> kTypes = {
    {"T", kFloatTypes}, {"M", kFloatTypes | kBoolTypes}, {"U", kFullFloatTypes}};

// `products` of queries, input q, with keys or of probabilities with values, causal ones by half.
// The lengths of sequences among the rows are not known by the shapes: each counts as the longest.
double attention_flops(const NodeSpec& spec, size_t q, double products) {
  const double length = extent_from_end(spec.input(q + 1), 2);  // [b, h, s, d] or [b, s, h * d]
  const double causal = spec.attrs().int_("is_causal") != 0 ? 0.5 : 1.0;
  return causal * products * 2 * count_of(spec.input(q)) * length;
}

// softmax(scale q k^T + mask) v written out.
std::vector<ValueId> attention_form(ExpandContext& e) {
  if (e.attrs().float_("dropout") != 0.0) {
    throw UnsupportedError("it draws random numbers; export the model in eval mode");
  }
  if (e.has_input(5)) throw UnsupportedError("'offsets' has no form in standard operators");
  const bool packed = e.rank(e.input(0)) == 3;
  const int64_t q_heads =
      packed ? e.attrs().int_("q_num_heads") : e.known_extent(e.input(0), 1, "number of heads");
  const int64_t given = e.attrs().int_("kv_num_heads");
  const int64_t kv_heads = !packed     ? e.known_extent(e.input(1), 1, "number of heads")
                           : given > 0 ? given
                                       : q_heads;
  const auto by_head = [&](size_t i, int64_t heads) {
    if (!packed) return e.input(i);
    return e.transpose(
        e.reshape(e.input(i), {0, 0, heads, e.known_extent(e.input(i), 2, "width") / heads}),
        {0, 2, 1, 3});
  };
  // Each head of the keys and values serves several of the queries.
  const auto for_queries = [&](ValueId a) {
    if (kv_heads == q_heads) return a;
    const ValueId repeated =
        e.op("Tile", {e.unsqueeze(a, {2}), e.int64s({1, 1, q_heads / kv_heads, 1, 1})});
    return e.reshape(repeated, e.concat({e.extent_of(a, 0), e.int64s({q_heads}), e.extent_of(a, 2),
                                         e.int64s({e.known_extent(a, 3, "width of a head")})},
                                        0));
  };
  const ValueId q = by_head(0, q_heads);
  const ValueId k = for_queries(by_head(1, kv_heads)), v = for_queries(by_head(2, kv_heads));
  const double width = static_cast<double>(e.known_extent(q, 3, "width of a head"));
  const double scale = e.attrs().has("scale") ? e.attrs().float_("scale") : 1.0 / std::sqrt(width);
  ValueId scores = e.op("MatMul", {e.mul(q, scale), e.transpose(k, {0, 1, 3, 2})});
  const ValueId hidden = e.scalar(e.dtype(scores), -std::numeric_limits<double>::infinity());
  if (e.has_input(3)) {
    scores = e.dtype(e.input(3)) == DType::boolean ? e.where(e.input(3), scores, hidden)
                                                   : e.add(scores, e.input(3));
  }
  if (e.attrs().int_("is_causal") != 0) {
    const ValueId rows = e.unsqueeze(e.positions(q, 2), {1});
    const ValueId columns = e.unsqueeze(e.positions(k, 2), {0});
    scores = e.where(e.op("GreaterOrEqual", {rows, columns}), scores, hidden);
  }
  ValueId shares = e.op("Softmax", {scores}, {{"axis", int64_t{-1}}});
  if (e.has_input(3)) {
    // A query that sees no key gives zeros.
    const ValueId blind = e.op("Equal", {e.reduce("ReduceMax", scores, {-1}, true), hidden});
    shares = e.where(blind, e.scalar(e.dtype(scores), 0.0), shares);
  }
  ValueId out = e.op("MatMul", {shares, v});
  if (packed) {
    const int64_t all = q_heads * e.known_extent(v, 3, "width of a head");
    out = e.reshape(e.transpose(out, {0, 2, 1, 3}), {0, 0, all});
  }
  if (!e.wants_output(1)) return {out, kNoValue};
  const ValueId logsumexp = e.reduce("ReduceLogSumExp", scores, {-1}, false);
  return {out, e.cast(logsumexp, logsumexp_type(e.dtype(q)))};
}

}  // namespace

void register_attention(OpRegistry& registry) {
  registry.add(
      {.name = "Attention",
       .domain = std::string(kOrtrainDomain),
       .summary = "dropout(softmax(scale q k^T + mask)) v per head, and the logarithm of the "
                  "softmax's denominator. [b, h, s, d], or [b, s, h * d] with q_num_heads. A bool "
                  "mask is true where a key is seen; is_causal hides keys j > i; a query that sees "
                  "no key gives zeros. With `offsets` the rows are those of several sequences, "
                  "[offsets[n], offsets[n + 1]) of sequence n, and see their own keys alone; rows "
                  "behind the last repeat row 0 and have no gradient.",
       .inputs = {{"q", "T"},
                  {"k", "T"},
                  {"v", "T"},
                  {"mask", "M", Arity::optional},
                  {"seed", "int64", Arity::optional},
                  {"offsets", "int64", Arity::optional}},
       .outputs = {{"out", "T"}, {"logsumexp", "U", Arity::optional}},
       .attrs = kOptions,
       .types = kTypes,
       .precision = Precision::allow,
       .infer = infer_attention,
       .gradient = attention_gradient,
       .draws_random_numbers = true,
       .flops = [](const NodeSpec& s) { return attention_flops(s, 0, 2); },
       .standard_form = attention_form});
  registry.add({.name = "AttentionGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "With p = exp(scores - logsumexp), dp = dout v^T, ds = p (dp - "
                           "sum(dout out)): dq = scale ds k, dk = scale ds^T q, dv = p^T dout, "
                           "dmask = ds summed to the shape of mask.",
                .inputs = {{"dout", "T"},
                           {"q", "T"},
                           {"k", "T"},
                           {"v", "T"},
                           {"out", "T"},
                           {"logsumexp", "U"},
                           {"mask", "M", Arity::optional},
                           {"seed", "int64", Arity::optional},
                           {"offsets", "int64", Arity::optional}},
                .outputs = {{"dq", "T", Arity::optional},
                            {"dk", "T", Arity::optional},
                            {"dv", "T", Arity::optional},
                            {"dmask", "M", Arity::optional}},
                .attrs = kOptions,
                .types = kTypes,
                .infer = infer_attention_grad,
                .draws_random_numbers = true,
                // The scores again, dp, dq, dk, dv.
                .flops = [](const NodeSpec& s) { return attention_flops(s, 1, 5); }});
}

}  // namespace ortrain::ops
