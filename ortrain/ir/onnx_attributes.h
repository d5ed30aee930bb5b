// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "onnx/onnx-ml.pb.h"
#include "ortrain/ir/attribute.h"
#include "ortrain/ir/onnx_external_data.h"

namespace ortrain {

// Throws InvalidModelError, or UnsupportedError for kinds that nodes of ours do not have
// (subgraphs, sparse tensors, types, references to attributes of a function).
Attributes attributes_from_onnx(onnx::NodeProto& node, ExternalData& external);

// ONNX holds float32. A float that needs more digits gets them in the node's metadata as well.
void write_attributes(const Attributes& attributes, onnx::NodeProto& node);

// "" when the key is absent.
const std::string& metadata_value(
    const onnx::wire::RepeatedMessage<onnx::StringStringEntryProto>& entries, std::string_view key);
void add_metadata(onnx::wire::RepeatedMessage<onnx::StringStringEntryProto>& entries,
                  std::string_view key, std::string_view value);

}  // namespace ortrain
