// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "onnx/onnx-ml.pb.h"
#include "ortrain/ir/onnx_external_data.h"
#include "ortrain/ir/tensor_data.h"

namespace ortrain {

// The one reader of tensors, wherever they stand in a model. Sizes are checked before anything is
// allocated. `tensor` keeps its name alone, so that the bytes are held
// once.
// Throws InvalidModelError, or UnsupportedError for element types and storage that we do not hold.
TensorData tensor_from_onnx(onnx::TensorProto& tensor, ExternalData& external);

// The element type of a code in a model; UnsupportedError or InvalidModelError.
DType dtype_from_model(int32_t code);

// Everything but the contents.
void write_tensor_type(const TensorData& data, onnx::TensorProto& tensor);
void write_tensor(const TensorData& data, onnx::TensorProto& tensor);

}  // namespace ortrain
