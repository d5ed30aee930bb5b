// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain {

inline OpDef sample_op(std::string name, int since, DTypeSet types, std::vector<FormalValue> inputs,
                       std::vector<FormalValue> outputs, std::vector<FormalAttribute> attrs,
                       std::function<void(InferContext&)> infer) {
  OpDef def;
  def.name = std::move(name);
  def.since = since;
  def.inputs = std::move(inputs);
  def.outputs = std::move(outputs);
  def.attrs = std::move(attrs);
  def.types = {{"T", types}, {"R", kFloatTypes}};
  def.infer = std::move(infer);
  return def;
}

inline void infer_sample_dropout(InferContext& c) {
  c.set_output(0, c.dtype(0), c.shape(0));
  c.set_output(1, DType::boolean, c.shape(0));
}

inline void infer_sample_reshape(InferContext& c) {
  if (!c.known(1)) throw UnsupportedError("input 'shape' must be known");
  c.set_output(0, c.dtype(0), *c.known(1));
}

inline void infer_sample_shape(InferContext& c) {
  c.set_output(0, DType::i64, {Dim(c.rank(0))});
  c.set_known(0, c.shape(0));
}

inline void infer_sample_nonzero(InferContext& c) {
  c.set_output(0, DType::i64, {Dim(c.rank(0)), c.unknown_extent(0, 1)});
}

// A few operators with every kind of attribute, for tests that must not depend on the real ones.
inline const OpRegistry& sample_registry() {
  static const OpRegistry* const registry = [] {
    const std::vector<FormalValue> x{{"x", "T"}};
    const std::vector<FormalValue> y{{"y", "T"}};
    const std::vector<FormalValue> y_int64{{"y", "int64"}};
    auto* ops = new OpRegistry();
    ops->add(sample_op("Identity", 1, kAllTypes, x, y, {}, infer_same_as_input));
    ops->add(sample_op("Add", 14, kNumericTypes, {{"a", "T"}, {"b", "T"}}, y, {}, infer_broadcast));
    ops->add(
        sample_op("Softmax", 13, kFloatTypes, x, y, {{"axis", int64_t{-1}}}, infer_same_as_input));
    ops->add(sample_op("LeakyRelu", 6, kFloatTypes, x, y, {{"alpha", 0.01}}, infer_same_as_input));
    ops->add(sample_op(
        "Dropout", 13, kFloatTypes,
        {{"x", "T"}, {"ratio", "R", Arity::optional}, {"training_mode", "bool", Arity::optional}},
        {{"y", "T"}, {"mask", "bool", Arity::optional}}, {{"seed", AttributeKind::int_}},
        infer_sample_dropout));
    ops->add(sample_op("Reshape", 14, kAllTypes, {{"x", "T"}, {"shape", "int64"}}, y,
                       {{"allowzero", int64_t{0}}}, infer_sample_reshape));
    ops->add(sample_op("Shape", 15, kAllTypes, x, y_int64, {}, infer_sample_shape));
    ops->add(sample_op("NonZero", 13, kAllTypes, x, y_int64, {}, infer_sample_nonzero));
    OpDef everything = sample_op("Everything", 1, kAllTypes, {{"x", "T", Arity::variadic}}, y,
                                 {{"i", AttributeKind::int_},
                                  {"f", AttributeKind::float_},
                                  {"s", AttributeKind::string_},
                                  {"is", AttributeKind::ints},
                                  {"fs", AttributeKind::floats},
                                  {"ss", AttributeKind::strings},
                                  {"t", AttributeKind::tensor},
                                  {"e", AttributeKind::floats},
                                  {"n", AttributeKind::strings}},
                                 infer_same_as_input);
    everything.domain = kOrtrainDomain;
    ops->add(std::move(everything));
    return ops;
  }();
  return *registry;
}

}  // namespace ortrain
