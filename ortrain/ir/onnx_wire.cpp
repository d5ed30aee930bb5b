// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/onnx_wire.h"

#include <bit>
#include <cstring>

#include "ortrain/base/error.h"
#include "ortrain/base/printable.h"

// Fixed-width values are little-endian on the wire and are copied as they are.
static_assert(std::endian::native == std::endian::little);

namespace ortrain::onnx_wire {

namespace {

uint64_t tag_of(uint32_t field, WireType wire) { return uint64_t{field} << 3 | wire; }

size_t body_size(int64_t value) { return varint_size(static_cast<uint64_t>(value)); }
size_t body_size(int32_t value) { return body_size(static_cast<int64_t>(value)); }
size_t body_size(uint64_t value) { return varint_size(value); }
size_t body_size(float) { return sizeof(float); }
size_t body_size(double) { return sizeof(double); }

template <typename T>
size_t packed_body_size(const RepeatedField<T>& values) {
  size_t total = 0;
  for (const T& value : values) total += body_size(value);
  return total;
}

}  // namespace

const std::string& empty_string() {
  static const std::string kEmpty;
  return kEmpty;
}

bool Reader::varint(uint64_t& value) {
  value = 0;
  for (int shift = 0; shift < 70; shift += 7) {
    if (at_ == end_) return false;
    const uint8_t byte = *at_++;
    value |= shift < 64 ? uint64_t{byte & 0x7fu} << shift : 0;
    if (byte < 0x80) return true;
  }
  return false;
}

bool Reader::raw(void* value, size_t size) {
  if (static_cast<size_t>(end_ - at_) < size) return false;
  std::memcpy(value, at_, size);
  at_ += size;
  return true;
}

bool Reader::nested(Reader& body) {
  uint64_t size = 0;
  if (!varint(size) || size > static_cast<size_t>(end_ - at_)) return false;
  body = Reader(at_, static_cast<size_t>(size), depth_ + 1);
  at_ += size;
  return true;
}

bool Reader::tag(uint32_t& field, uint32_t& wire) {
  uint64_t value = 0;
  if (!varint(value) || value >> 32 != 0 || value < 8) return false;
  field = static_cast<uint32_t>(value >> 3);
  wire = static_cast<uint32_t>(value & 7);
  return true;
}

bool Reader::skip(uint32_t field, uint32_t wire) {
  uint64_t ignored = 0;
  switch (wire) {
    case kVarint:
      return varint(ignored);
    case kFixed64:
      return raw(&ignored, 8);
    case kFixed32:
      return raw(&ignored, 4);
    case kBytes: {
      Reader body(nullptr, 0, depth_);
      return nested(body);
    }
    case kGroup:
      if (++depth_ > kMaxDepth) return false;
      for (;;) {
        uint32_t inner_field = 0;
        uint32_t inner_wire = 0;
        if (!tag(inner_field, inner_wire)) return false;
        if (inner_wire == kEndGroup) {
          --depth_;
          return inner_field == field;
        }
        if (!skip(inner_field, inner_wire)) return false;
      }
    default:
      return false;
  }
}

bool Reader::scalar(uint32_t wire, uint64_t& value) { return wire == kVarint && varint(value); }

bool Reader::scalar(uint32_t wire, int64_t& value) {
  uint64_t bits = 0;
  if (!scalar(wire, bits)) return false;
  value = static_cast<int64_t>(bits);
  return true;
}

bool Reader::scalar(uint32_t wire, int32_t& value) {
  uint64_t bits = 0;
  if (!scalar(wire, bits)) return false;
  value = static_cast<int32_t>(static_cast<uint32_t>(bits));
  return true;
}

bool Reader::scalar(uint32_t wire, float& value) {
  return wire == kFixed32 && raw(&value, sizeof(value));
}

bool Reader::scalar(uint32_t wire, double& value) {
  return wire == kFixed64 && raw(&value, sizeof(value));
}

bool Reader::scalar(uint32_t wire, std::string& value) {
  Reader body(nullptr, 0, depth_);
  if (wire != kBytes || !nested(body)) return false;
  value.assign(reinterpret_cast<const char*>(body.at_), static_cast<size_t>(body.end_ - body.at_));
  return true;
}

bool Reader::text(uint32_t wire, std::string& value) {
  constexpr size_t kMostShown = 64;
  if (!scalar(wire, value)) return false;
  if (is_utf8(value)) return true;
  throw InvalidModelError(
      str("a name or text of the model is no UTF-8: '", value.substr(0, kMostShown), "'"));
}

size_t varint_size(uint64_t value) {
  return static_cast<size_t>((std::bit_width(value | 1) + 6) / 7);
}

size_t scalar_size(uint32_t field, int64_t value) {
  return varint_size(tag_of(field, kVarint)) + body_size(value);
}
size_t scalar_size(uint32_t field, float) { return varint_size(tag_of(field, kFixed32)) + 4; }
size_t scalar_size(uint32_t field, double) { return varint_size(tag_of(field, kFixed64)) + 8; }
size_t scalar_size(uint32_t field, const std::string& value) {
  return bytes_size(field, value.size());
}
size_t bytes_size(uint32_t field, size_t size) {
  return varint_size(tag_of(field, kBytes)) + varint_size(size) + size;
}

template <typename T>
size_t packed_size(uint32_t field, const RepeatedField<T>& values) {
  return values.empty() ? 0 : bytes_size(field, packed_body_size(values));
}

void Writer::varint(uint64_t value) {
  for (; value >= 0x80; value >>= 7) out_.push_back(static_cast<char>(value | 0x80));
  out_.push_back(static_cast<char>(value));
}

void Writer::header(uint32_t field, size_t size) {
  varint(tag_of(field, kBytes));
  varint(size);
}

void Writer::scalar(uint32_t field, int64_t value) {
  varint(tag_of(field, kVarint));
  varint(static_cast<uint64_t>(value));
}

void Writer::scalar(uint32_t field, float value) {
  varint(tag_of(field, kFixed32));
  out_.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void Writer::scalar(uint32_t field, double value) {
  varint(tag_of(field, kFixed64));
  out_.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void Writer::scalar(uint32_t field, const std::string& value) {
  header(field, value.size());
  out_.append(value);
}

template <typename T>
void Writer::packed(uint32_t field, const RepeatedField<T>& values) {
  if (values.empty()) return;
  header(field, packed_body_size(values));
  for (const T& value : values) {
    if constexpr (std::is_floating_point_v<T>) {
      out_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    } else {
      varint(static_cast<uint64_t>(static_cast<int64_t>(value)));
    }
  }
}

template size_t packed_size(uint32_t, const RepeatedField<int32_t>&);
template size_t packed_size(uint32_t, const RepeatedField<int64_t>&);
template size_t packed_size(uint32_t, const RepeatedField<uint64_t>&);
template size_t packed_size(uint32_t, const RepeatedField<float>&);
template size_t packed_size(uint32_t, const RepeatedField<double>&);
template void Writer::packed(uint32_t, const RepeatedField<int32_t>&);
template void Writer::packed(uint32_t, const RepeatedField<int64_t>&);
template void Writer::packed(uint32_t, const RepeatedField<uint64_t>&);
template void Writer::packed(uint32_t, const RepeatedField<float>&);
template void Writer::packed(uint32_t, const RepeatedField<double>&);

}  // namespace ortrain::onnx_wire
