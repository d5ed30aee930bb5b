// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ortrain/ir/graph.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/tensor_data.h"

// ONNX files <-> Graph. A graph at any stage saves as a valid ONNX model: opset 23 of the standard
// domain, version 1 of ours, symbolic extents as dim_param. What ONNX has no field for (roles,
// phases, digits of a float beyond float32) stands in metadata_props under "ortrain.*", so that
// loading gives the same graph back (see first_difference).

namespace ortrain {

struct LoadOptions {
  // `weights`: parameters are those that look trained: floats that are no scalars, which exporters
  // write for numbers of a formula, and neither settings (bounds, scales of a resize) nor running
  // statistics.
  enum class Initializers { constants, parameters, weights };

  // What initializers become that the model does not mark itself. As parameters they are inputs
  // with a gradient, and their contents are in OnnxModel::values.
  Initializers initializers = Initializers::constants;
  // With `parameters`: those that become one. Empty: all of a float type.
  std::vector<std::string> parameter_names = {};
  // Where external data of a model in memory lie; without it they are refused. A model in a file
  // has them in its own folder.
  std::optional<std::filesystem::path> external_data_directory = std::nullopt;
  // Follow symbolic links to external data, as caches of downloaded models need.
  bool allow_links = false;
  // Bytes that a model may take in memory before it is refused, without its external data.
  // 0: 32 times its size and 64 MiB.
  uint64_t memory_limit = 0;
};

struct OnnxModel {
  Graph graph;
  // Contents of parameters and buffers that the file holds, by GraphInput::target.
  std::map<std::string, TensorData> values;
};

// Reads models of IR version 3 to 14 and opset up to 28, if every operator in them has had its
// present meaning since that opset.
// Throws InvalidModelError for what breaks a rule of ONNX, UnsupportedError for valid models that
// we do not take (unknown operators, subgraphs, functions, strings, sparse tensors, unknown ranks),
// naming node and layer; FileError for files that cannot be read.
OnnxModel load_onnx_model(const std::filesystem::path& path, const LoadOptions& options = {});
OnnxModel load_onnx_model(const std::filesystem::path& path, const LoadOptions& options,
                          const OpRegistry& registry);
OnnxModel load_onnx_model_bytes(std::span<const std::byte> bytes, const LoadOptions& options = {});
OnnxModel load_onnx_model_bytes(std::span<const std::byte> bytes, const LoadOptions& options,
                                const OpRegistry& registry);
// The graph alone.
Graph load_onnx(const std::filesystem::path& path, const LoadOptions& options = {});
Graph load_onnx_bytes(std::span<const std::byte> bytes, const LoadOptions& options = {});

struct SaveOptions {
  // Contents of parameters and buffers, by GraphInput::target; written as initializers.
  std::map<std::string, TensorData> values = {};
  // Whether what has contents stands among the inputs too, with its role: other programs take it
  // for a value that may be replaced, and fold less.
  bool lists_initializers = true;
  // Tensors of at least this many bytes go to a second file; unset: none does.
  std::optional<size_t> external_data_threshold = std::nullopt;
  // Name of that file, in the folder of the model. Empty: a name with a checksum of the contents,
  // so that a model saved over another leaves the old pair intact until the last step.
  std::string external_data_file = "";
};

// Writes aside, flushes and renames. Throws FileError; InvalidModelError when `values` do not fit.
void save_onnx(const Graph& graph, const std::filesystem::path& path,
               const SaveOptions& options = {});
// The same bytes; `options` may not ask for external data.
std::string to_onnx_bytes(const Graph& graph, const SaveOptions& options = {});

}  // namespace ortrain
