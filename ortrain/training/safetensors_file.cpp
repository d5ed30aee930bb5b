// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/safetensors_file.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kMaxHeader = uint64_t{100} << 20;  // the format's own bound
constexpr size_t kChunk = size_t{1} << 20;
constexpr size_t kAlignment = 8;

constexpr std::array<std::pair<std::string_view, DType>, 13> kTypes{{
    {"BOOL", DType::boolean},
    {"U8", DType::u8},
    {"I8", DType::i8},
    {"U16", DType::u16},
    {"I16", DType::i16},
    {"U32", DType::u32},
    {"I32", DType::i32},
    {"U64", DType::u64},
    {"I64", DType::i64},
    {"F16", DType::f16},
    {"BF16", DType::bf16},
    {"F32", DType::f32},
    {"F64", DType::f64},
}};

std::string_view type_name(DType dtype) {
  for (const auto& [name, type] : kTypes) {
    if (type == dtype) return name;
  }
  throw UnsupportedError(str("safetensors has no element type ", name_of(dtype)));
}

class Hash {
 public:
  Hash() { XXH3_128bits_reset(&state_); }
  void add(const void* data, size_t size) { XXH3_128bits_update(&state_, data, size); }
  std::string text() const {
    const XXH128_hash_t value = XXH3_128bits_digest(&state_);
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string result;
    for (const uint64_t half : {value.high64, value.low64}) {
      for (int shift = 60; shift >= 0; shift -= 4) result += kDigits[(half >> shift) & 15];
    }
    return result;
  }

 private:
  XXH3_state_t state_;
};

[[noreturn]] void fail(const std::string& what) { throw InvalidModelError("safetensors: " + what); }

uint64_t whole_number(const Json& value, const std::string& what) {
  if (!value.is_number_unsigned()) fail(what + " is no whole number");
  return value.get<uint64_t>();
}

TensorSpec spec_from(const Json& entry, const std::string& name) {
  const auto dtype = entry.find("dtype"), shape = entry.find("shape");
  if (dtype == entry.end() || !dtype->is_string()) fail("'" + name + "' has no dtype");
  if (shape == entry.end() || !shape->is_array()) fail("'" + name + "' has no shape");
  TensorSpec spec;
  const auto known = std::ranges::find_if(
      kTypes, [&](const auto& type) { return type.first == dtype->get_ref<const std::string&>(); });
  if (known == kTypes.end()) {
    throw UnsupportedError(str("safetensors: '", name, "' has the element type ",
                               dtype->get_ref<const std::string&>()));
  }
  spec.dtype = known->second;
  uint64_t elements = 1;
  for (const Json& extent : *shape) {
    const uint64_t size = whole_number(extent, "an extent of '" + name + "'");
    if (size > static_cast<uint64_t>(INT64_MAX) ||
        __builtin_mul_overflow(elements, std::max<uint64_t>(size, 1), &elements) ||
        elements > static_cast<uint64_t>(INT64_MAX) / 8) {
      fail("'" + name + "' is too large");
    }
    spec.dims.push_back(static_cast<int64_t>(size));
  }
  return spec;
}

}  // namespace

Json parse_flat_json(const std::string& text) {
  constexpr int kMostLevels = 8;
  bool deep = false;
  const auto keep = [&](int depth, Json::parse_event_t, Json&) {
    deep = deep || depth > kMostLevels;
    return depth <= kMostLevels;
  };
  Json parsed = Json::parse(text, keep, /*allow_exceptions=*/false);
  return deep ? Json() : parsed;
}

std::string hash_of(std::string_view bytes) {
  Hash hash;
  hash.add(bytes.data(), bytes.size());
  return hash.text();
}

FileDigest write_safetensors(const std::filesystem::path& directory, const std::string& name,
                             const std::map<std::string, MutableTensor>& tensors,
                             const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  // The widest elements first, so that each tensor is aligned to its elements.
  std::vector<const std::pair<const std::string, MutableTensor>*> order;
  for (const auto& tensor : tensors) order.push_back(&tensor);
  std::ranges::stable_sort(order, [](const auto* a, const auto* b) {
    return size_of(a->second.spec.dtype) > size_of(b->second.spec.dtype);
  });
  uint64_t offset = 0;
  for (const auto* entry : order) {
    const TensorSpec& spec = entry->second.spec;
    header[entry->first] = {{"dtype", type_name(spec.dtype)},
                            {"shape", spec.dims},
                            {"data_offsets", {offset, offset + spec.bytes()}}};
    offset += spec.bytes();
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::type_error&) {
    throw InvalidModelError("safetensors: the name of a tensor is no UTF-8 text");
  }
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  if (text.size() > kMaxHeader) throw UnsupportedError("safetensors: the header is too large");

  OutputFile file(directory, name);
  Hash hash;
  const auto put = [&](const void* data, size_t size) {
    file.write(data, size);
    hash.add(data, size);
  };
  const uint64_t length = text.size();
  put(&length, sizeof(length));
  put(text.data(), text.size());
  for (const auto* entry : order) {
    if (entry->second.spec.bytes() == 0) continue;
    const MutableTensor tensor = entry->second.on_host();
    put(tensor.data, tensor.spec.bytes());
  }
  const FileDigest digest{file.size(), hash.text()};
  file.commit();
  return digest;
}

SafetensorsFile::SafetensorsFile(InputFile file) : file_(std::move(file)) {
  uint64_t length = 0;
  if (file_.size() < sizeof(length)) fail("the file is too short");
  file_.read(0, &length, sizeof(length));
  if (length > kMaxHeader || length > file_.size() - sizeof(length)) {
    fail("the header is longer than the file");
  }
  std::string text(length, '\0');
  file_.read(sizeof(length), text.data(), text.size());
  const Json header = parse_flat_json(text);
  if (!header.is_object()) fail("the header is no JSON object");
  const uint64_t start = sizeof(length) + length, size = file_.size() - start;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const auto& [name, entry] : header.items()) {
    if (!entry.is_object()) fail("'" + name + "' is no object");
    if (name == "__metadata__") {
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) fail("the metadata '" + key + "' is no string");
        metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    const TensorSpec spec = spec_from(entry, name);
    const auto offsets = entry.find("data_offsets");
    if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2) {
      fail("'" + name + "' has no data_offsets");
    }
    const uint64_t begin = whole_number((*offsets)[0], "an offset of '" + name + "'");
    const uint64_t end = whole_number((*offsets)[1], "an offset of '" + name + "'");
    if (begin > end || end > size || end - begin != spec.bytes()) {
      fail("the bytes of '" + name + "' are not those of its shape, or outside of the file");
    }
    ranges.emplace_back(begin, end);
    entries_[name] = {spec, start + begin};
  }
  std::ranges::sort(ranges);
  uint64_t covered = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin != covered) fail("tensors overlap, or bytes belong to none");
    covered = end;
  }
  if (covered != size) fail("bytes belong to no tensor");
}

MutableTensor SafetensorsFile::read(const Entry& entry) const {
  MutableTensor tensor = MutableTensor::allocate(entry.spec);
  if (entry.spec.bytes() > 0) file_.read(entry.offset, tensor.data, entry.spec.bytes());
  if (entry.spec.dtype == DType::boolean) {
    // Any byte may stand in a file, a bool is 0 or 1.
    auto* const bytes = static_cast<unsigned char*>(tensor.data);
    std::transform(bytes, bytes + entry.spec.bytes(), bytes,
                   [](unsigned char byte) { return byte != 0; });
  }
  return tensor;
}

FileDigest SafetensorsFile::digest() const {
  Hash hash;
  std::vector<char> chunk(kChunk);
  for (uint64_t at = 0; at < file_.size(); at += chunk.size()) {
    const size_t size = static_cast<size_t>(std::min<uint64_t>(chunk.size(), file_.size() - at));
    file_.read(at, chunk.data(), size);
    hash.add(chunk.data(), size);
  }
  return {file_.size(), hash.text()};
}

}  // namespace ortrain
