// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/printable.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace ortrain {
namespace {

struct CodePoint {
  uint32_t value = 0;
  size_t bytes = 0;  // 0: the text does not begin with one
};

CodePoint first_code_point(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  uint32_t value = lead & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    value = value << 6 | (byte(i) & 0x3fu);
  }
  const uint32_t least = bytes == 4 ? 0x10000 : bytes == 3 ? 0x800 : 0x80;
  const bool surrogate = value >= 0xd800 && value <= 0xdfff;
  if (value < least || value > 0x10ffff || surrogate) return {};
  return {value, bytes};
}

bool is_invisible(uint32_t value) {
  const bool control = value < 0x20 || (value >= 0x7f && value <= 0x9f);
  const bool direction = value == 0x61c || value == 0x200e || value == 0x200f ||
                         (value >= 0x202a && value <= 0x202e) ||
                         (value >= 0x2066 && value <= 0x2069);
  return control || direction || value == 0x2028 || value == 0x2029;
}

void append_escaped(std::string& to, std::string_view bytes) {
  static constexpr std::string_view kHex = "0123456789abcdef";
  for (const char c : bytes) {
    const auto byte = static_cast<uint8_t>(c);
    to += "\\x";
    to += kHex[byte >> 4];
    to += kHex[byte & 15];
  }
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const CodePoint point = first_code_point(text);
    if (point.bytes == 0) return false;
    text.remove_prefix(point.bytes);
  }
  return true;
}

std::string printable(std::string_view text, Breaks breaks) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const CodePoint point = first_code_point(text);
    const std::string_view bytes = text.substr(0, std::max<size_t>(point.bytes, 1));
    const bool is_break = text.front() == '\n' || text.front() == '\t';
    const bool shown = is_break ? breaks == Breaks::kept : !is_invisible(point.value);
    if (point.bytes > 0 && shown) {
      result += bytes;
    } else {
      append_escaped(result, bytes);
    }
    text.remove_prefix(bytes.size());
  }
  return result;
}

}  // namespace ortrain
