// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <utility>

#include "ortrain/ir/graph.h"
#include "ortrain/ir/roles.h"

// The keys and words that saved models carry in metadata_props.
namespace ortrain::onnx_metadata {

// On value infos of inputs and outputs.
inline constexpr std::string_view kRole = "ortrain.role";
inline constexpr std::string_view kTarget = "ortrain.target";
inline constexpr std::string_view kRequiresGrad = "ortrain.requires_grad";
// On outputs: the name where it is not that of the value.
inline constexpr std::string_view kOutputName = "ortrain.output_name";
// On nodes.
inline constexpr std::string_view kPhase = "ortrain.phase";
inline constexpr std::string_view kCheckpoint = "ortrain.checkpoint";
// An Identity that only gives an output its own name.
inline constexpr std::string_view kAlias = "ortrain.alias";
// + name of a float attribute: its digits beyond float32.
inline constexpr std::string_view kFloat64 = "ortrain.float64.";
// On graphs: ONNX demands a name, the graph has none.
inline constexpr std::string_view kUnnamed = "ortrain.unnamed";
// On graphs whose inputs do not list the initializers: those that are trained, a line each.
inline constexpr std::string_view kTrained = "ortrain.trained";

inline constexpr std::string_view kBackward = "backward";
inline constexpr std::string_view kTrue = "true";

}  // namespace ortrain::onnx_metadata
