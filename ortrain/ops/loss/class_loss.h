// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "ortrain/ir/infer_context.h"

namespace ortrain::ops {

enum class Reduction { none, mean, sum };

// The attribute 'reduction'; throws InvalidModelError for other words.
Reduction reduction_of(const AttributeReader& attrs);

// Checks scores [N, C, d...] (or [C]) against labels [N, d...] (or a scalar) and class weights [C],
// the latter at input `weight` if it is there; throws ShapeError.
void check_class_loss(const InferContext& context, size_t scores, size_t labels, size_t weight);

// The shape of the loss: that of the labels, or a scalar when it is reduced.
Shape loss_shape(const AttributeReader& attrs, const Shape& labels);

}  // namespace ortrain::ops
