// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/onnx_external_data.h"

#include <charconv>
#include <set>

#include "ortrain/base/error.h"
#include "ortrain/ir/text_scanner.h"

namespace ortrain {
namespace {

constexpr size_t kMaxOpenFiles = 256;

uint64_t parse_count(const std::string& key, const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < 0) {
    throw InvalidModelError(str("external data: ", key, " is ", quoted_text(text.substr(0, 40))));
  }
  return static_cast<uint64_t>(value);
}

}  // namespace

ExternalData::Location ExternalData::parse_location(const onnx::TensorProto& tensor) {
  Location location;
  std::set<std::string> seen;
  for (const onnx::StringStringEntryProto& entry : tensor.external_data()) {
    const std::string& key = entry.key();
    if (!seen.insert(key).second) {
      throw InvalidModelError(str("external data: ", quoted_text(key), " is given twice"));
    }
    if (key == "location") {
      location.file = entry.value();
    } else if (key == "offset") {
      location.offset = parse_count(key, entry.value());
    } else if (key == "length") {
      location.length = parse_count(key, entry.value());
    } else if (key == "checksum") {
      throw UnsupportedError("external data with a checksum");
    } else {
      throw InvalidModelError(
          str("external data: the key ", quoted_text(key.substr(0, 40)), " is not known"));
    }
  }
  if (!seen.contains("location")) throw InvalidModelError("external data: no location");
  return location;
}

ExternalData::OpenFile& ExternalData::open(const std::string& name) {
  auto found = files_.find(name);
  if (found != files_.end()) return found->second;
  if (!directory_path_) {
    throw UnsupportedError(
        "the model has external data, and no folder is given in which they may lie");
  }
  if (files_.size() >= kMaxOpenFiles) {
    throw UnsupportedError(str("external data in more than ", kMaxOpenFiles, " files"));
  }
  if (!directory_) directory_.emplace(*directory_path_);
  return files_.emplace(name, OpenFile{directory_->open(name, allow_links_), 0, {}}).first->second;
}

TensorData ExternalData::read(const onnx::TensorProto& tensor, DType dtype, const Dims& dims,
                              uint64_t bytes) {
  const Location location = parse_location(tensor);
  OpenFile& source = open(location.file);
  const uint64_t size = source.file.size();
  if (location.length && *location.length != bytes) {
    throw InvalidModelError(
        str("external data: ", *location.length, " bytes, the tensor needs ", bytes));
  }
  if (location.offset > size || bytes > size - location.offset) {
    throw InvalidModelError(str("external data: bytes ", location.offset, " to ",
                                location.offset + bytes, " of ", quoted_text(location.file),
                                ", which has ", size));
  }
  auto [region, fresh] = source.regions.try_emplace({location.offset, bytes});
  if (!fresh) {
    // Tied weights: the same bytes again.
    const TensorData& known = region->second;
    return TensorData(dtype, dims, known.data(), std::make_shared<TensorData>(known));
  }
  source.bytes_read += bytes;
  if (source.bytes_read > size) {
    throw InvalidModelError(str("external data: tensors overlap in ", quoted_text(location.file)));
  }
  void* data = nullptr;
  TensorData result = TensorData::allocate(dtype, dims, &data);
  source.file.read(location.offset, data, bytes);
  region->second = result;
  return result;
}

}  // namespace ortrain
