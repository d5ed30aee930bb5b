// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "ortrain/ir/op_def.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/text_scanner.h"

namespace ortrain {

// Shortest decimal text that reads back as the same double; has a point, exponent, inf or nan.
std::string float_text(double value);
std::string extent_text(const Dim& dim);
std::string shape_text(const Shape& shape);  // "[b, 128]"
std::string tensor_text(const TensorData& tensor, const TextOptions& options);
// " <axis = -1, ...>", or nothing when there are none.
std::string attributes_text(const Attributes& attributes, const TextOptions& options);

DType parse_dtype(TextScanner& scanner);
Shape parse_shape(TextScanner& scanner);  // "[...]"; nothing at all is a scalar
bool at_tensor(TextScanner& scanner);
TensorData parse_tensor(TextScanner& scanner);
// "<...>" or nothing. `def` decides how numbers are read where the text leaves it open; may be
// null.
Attributes parse_attributes(TextScanner& scanner, const OpDef* def);

}  // namespace ortrain
