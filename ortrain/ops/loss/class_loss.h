// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_def.h"

namespace ortrain::ops {

enum class Reduction { none, mean, sum };

// The attribute 'reduction'; throws InvalidModelError for other words.
Reduction reduction_of(const AttributeReader& attrs);

// Checks scores [N, C, d...] (or [C]) against labels [N, d...] (or a scalar) and class weights [C],
// the latter at input `weight` if it is there; throws ShapeError.
void check_class_loss(const InferContext& context, size_t scores, size_t labels, size_t weight);

// Of CrossEntropy and its gradients: attributes, and the types of logits (T), labels (I), logsumexp
// (U) and loss (L).
std::vector<FormalAttribute> cross_entropy_attributes();
std::map<std::string, DTypeSet> cross_entropy_types();

// The type that sums over scores of a type have: float, or double for doubles.
DType full_type(DType type);
// The type of the loss of scores: theirs, or, by the attribute 'full_loss', full_type of it.
DType loss_type(const AttributeReader& attrs, DType scores);

// The shape of the loss: that of the labels, or a scalar when it is reduced.
Shape loss_shape(const AttributeReader& attrs, const Shape& labels);

// Checks that dloss, input 0, has the type of the loss of such scores; throws DTypeError.
void check_loss_gradient(const InferContext& context, DType scores);

}  // namespace ortrain::ops
