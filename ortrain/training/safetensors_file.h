// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "ortrain/ir/confined_file.h"
#include "ortrain/runtime/kernel.h"
#include "ortrain/training/training_state.h"

// The safetensors format (github.com/huggingface/safetensors): eight bytes with the length of a
// JSON header, the header, and the bytes of the tensors, little-endian, without gaps.

namespace ortrain {

// What tells a file from a damaged one.
struct FileDigest {
  uint64_t size = 0;
  std::string hash;  // 128 bits of XXH3, as hexadecimal digits
  bool operator==(const FileDigest&) const = default;
};

// Writes aside, flushes and renames. Throws FileError.
FileDigest write_safetensors(const std::filesystem::path& directory, const std::string& name,
                             const std::map<std::string, MutableTensor>& tensors,
                             const std::map<std::string, std::string>& metadata = {});

// A file that is open for reading. What its header says is checked against the size of the file
// before anything is allocated.
class SafetensorsFile {
 public:
  // Throws InvalidModelError for what breaks the format, UnsupportedError for element types that
  // the engine does not hold, FileError for files that cannot be read.
  explicit SafetensorsFile(InputFile file);

  struct Entry {
    TensorSpec spec;
    uint64_t offset = 0;  // from the start of the file
  };
  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  MutableTensor read(const Entry& entry) const;
  // Reads all of the file.
  FileDigest digest() const;

 private:
  InputFile file_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

// A JSON object of few levels; null where it is none, or deeper. Nothing recurses on its contents.
nlohmann::json parse_flat_json(const std::string& text);

// The digest of a small file's contents.
std::string hash_of(std::string_view bytes);

}  // namespace ortrain
