// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ops/loss/class_loss.h"

namespace ortrain::ops {
namespace {

bool may_be_equal(const Dim& a, const Dim& b) {
  return a == b || !a.is_constant() || !b.is_constant();
}

}  // namespace

Reduction reduction_of(const AttributeReader& attrs) {
  const std::string& word = attrs.string_("reduction");
  if (word == "none") return Reduction::none;
  if (word == "mean") return Reduction::mean;
  if (word == "sum") return Reduction::sum;
  throw InvalidModelError(str("attribute 'reduction' is '", word, "', not none, mean or sum"));
}

void check_class_loss(const InferContext& context, size_t scores, size_t labels, size_t weight) {
  const Shape& x = context.shape(scores);
  const Shape& y = context.shape(labels);
  if (x.empty()) throw ShapeError("scores need a dimension of classes");
  const size_t class_axis = x.size() == 1 ? 0 : 1;
  Shape wanted = x;
  wanted.erase(wanted.begin() + static_cast<int64_t>(class_axis));
  bool fits = y.size() == wanted.size();
  for (size_t i = 0; fits && i < y.size(); ++i) fits = may_be_equal(y[i], wanted[i]);
  if (!fits) {
    throw ShapeError(str("labels of shape ", shape_str(y), " do not fit scores of shape ",
                         shape_str(x), ", expected ", shape_str(wanted)));
  }
  if (context.has_input(weight)) {
    const Shape& w = context.shape(weight);
    if (w.size() != 1 || !may_be_equal(w[0], x[class_axis])) {
      throw ShapeError(str("class weights of shape ", shape_str(w), " do not fit ",
                           x[class_axis].str(), " classes"));
    }
  }
}

std::vector<FormalAttribute> cross_entropy_attributes() {
  return {{"reduction", std::string("mean")},
          {"ignore_index", int64_t{-100}},
          {"label_smoothing", 0.0},
          {"full_loss", int64_t{0}}};
}

std::map<std::string, DTypeSet> cross_entropy_types() {
  return {{"T", kFloatTypes}, {"I", kIndexTypes}, {"U", kFullFloatTypes}, {"L", kFloatTypes}};
}

DType full_type(DType type) { return type == DType::f64 ? DType::f64 : DType::f32; }

DType loss_type(const AttributeReader& attrs, DType scores) {
  const int64_t full = attrs.int_("full_loss");
  if (full != 0 && full != 1) {
    throw InvalidModelError(str("attribute 'full_loss' is ", full, ", not 0 or 1"));
  }
  return full != 0 ? full_type(scores) : scores;
}

void check_loss_gradient(const InferContext& context, DType scores) {
  const DType wanted = loss_type(context.attrs(), scores);
  if (context.dtype(0) == wanted) return;
  throw DTypeError(str("'dloss' is ", name_of(context.dtype(0)), ", expected ", name_of(wanted)));
}

Shape loss_shape(const AttributeReader& attrs, const Shape& labels) {
  return reduction_of(attrs) == Reduction::none ? labels : Shape{};
}

}  // namespace ortrain::ops
