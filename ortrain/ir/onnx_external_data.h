// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "onnx/onnx-ml.pb.h"
#include "ortrain/ir/confined_file.h"
#include "ortrain/ir/tensor_data.h"

namespace ortrain {

// The one place that opens files which a model names.
class ExternalData {
 public:
  // No folder: every tensor with external data is refused.
  ExternalData(std::optional<std::filesystem::path> directory, bool allow_links)
      : directory_path_(std::move(directory)), allow_links_(allow_links) {}

  // `bytes` is what the type and shape of the tensor need. The file is long enough before anything
  // is allocated, and all tensors of a file take no more memory than the file has bytes.
  TensorData read(const onnx::TensorProto& tensor, DType dtype, const Dims& dims, uint64_t bytes);

 private:
  struct Location {
    std::string file;
    uint64_t offset = 0;
    std::optional<uint64_t> length;
  };
  struct OpenFile {
    InputFile file;
    uint64_t bytes_read = 0;
    std::map<std::pair<uint64_t, uint64_t>, TensorData> regions;  // by offset, length
  };

  static Location parse_location(const onnx::TensorProto& tensor);
  OpenFile& open(const std::string& name);

  std::optional<std::filesystem::path> directory_path_;
  bool allow_links_;
  std::optional<ConfinedDirectory> directory_;
  std::map<std::string, OpenFile> files_;
};

}  // namespace ortrain
