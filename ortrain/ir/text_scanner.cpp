// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/text_scanner.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "ortrain/base/dtype.h"
#include "ortrain/base/error.h"
#include "ortrain/base/printable.h"

namespace ortrain {
namespace {

bool starts_name(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '/';
}

bool continues_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '/' || c == '.';
}

// Words with a meaning of their own where a name could stand.
bool is_reserved(std::string_view name) {
  static constexpr std::array<std::string_view, 9> kWords{
      "_", "as", "const", "forward", "backward", "grad", "inf", "nan", "b64"};
  return std::find(kWords.begin(), kWords.end(), name) != kWords.end() ||
         dtype_from_name(name).has_value();
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

bool is_bare_name(std::string_view name) {
  return !name.empty() && starts_name(name.front()) &&
         std::all_of(name.begin(), name.end(), continues_name) && !is_reserved(name);
}

std::string quoted_text(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        result += "\\\"";
        break;
      case '\\':
        result += "\\\\";
        break;
      case '\n':
        result += "\\n";
        break;
      case '\t':
        result += "\\t";
        break;
      case '\r':
        result += "\\r";
        break;
      default:
        result += c;
    }
  }
  return printable(result, Breaks::escaped) + "\"";
}

std::string name_text(std::string_view name) {
  return is_bare_name(name) ? std::string(name) : quoted_text(name);
}

std::string TextScanner::place(size_t position) const {
  const std::string_view before = text_.substr(0, position);
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const size_t line_start = before.rfind('\n');
  const size_t column = line_start == std::string_view::npos ? position + 1 : position - line_start;
  return str(line, ":", column, ": ");
}

void TextScanner::fail(const std::string& message) const { fail_at(at_, message); }

void TextScanner::fail_at(size_t position, const std::string& message) const {
  throw InvalidModelError(place(position) + message);
}

void TextScanner::skip_blanks() {
  while (at_ < text_.size()) {
    if (text_[at_] == '#') {
      at_ = std::min(text_.find('\n', at_), text_.size());
    } else if (std::isspace(static_cast<unsigned char>(text_[at_]))) {
      ++at_;
    } else {
      return;
    }
  }
}

bool TextScanner::at_end() { return peek() == '\0' && at_ == text_.size(); }

char TextScanner::peek() {
  skip_blanks();
  return at_ < text_.size() ? text_[at_] : '\0';
}

bool TextScanner::accept(std::string_view token) {
  skip_blanks();
  if (!text_.substr(at_).starts_with(token)) return false;
  at_ += token.size();
  return true;
}

void TextScanner::expect(std::string_view token) {
  if (!accept(token)) fail(str("'", token, "' is expected here"));
}

std::string_view TextScanner::peek_word() {
  skip_blanks();
  if (at_ >= text_.size() || !starts_name(text_[at_])) return {};
  size_t end = at_;
  while (end < text_.size() && continues_name(text_[end])) ++end;
  return text_.substr(at_, end - at_);
}

bool TextScanner::accept_word(std::string_view word) {
  if (peek_word() != word) return false;
  at_ += word.size();
  return true;
}

bool TextScanner::at_name() { return peek() == '"' || is_bare_name(peek_word()); }

std::string TextScanner::name() {
  if (peek() == '"') return quoted_string();
  const std::string_view word = peek_word();
  if (word.empty()) fail("a name is expected here");
  if (is_reserved(word)) fail(str("'", word, "' is no name unless it is quoted"));
  at_ += word.size();
  return std::string(word);
}

std::string TextScanner::quoted_string() {
  if (peek() != '"') fail("a quoted string is expected here");
  const size_t begin = at_++;
  std::string result;
  while (at_ < text_.size() && text_[at_] != '"') {
    if (text_[at_] != '\\') {
      result += text_[at_++];
      continue;
    }
    const char escape = at_ + 1 < text_.size() ? text_[at_ + 1] : '\0';
    const int high = at_ + 2 < text_.size() ? hex_digit(text_[at_ + 2]) : -1;
    const int low = at_ + 3 < text_.size() ? hex_digit(text_[at_ + 3]) : -1;
    if (escape == 'x' && high >= 0 && low >= 0) {
      result += static_cast<char>(high * 16 + low);
      at_ += 4;
      continue;
    }
    switch (escape) {
      case '"':
        result += '"';
        break;
      case '\\':
        result += '\\';
        break;
      case 'n':
        result += '\n';
        break;
      case 't':
        result += '\t';
        break;
      case 'r':
        result += '\r';
        break;
      default:
        fail("this escape is not known");
    }
    at_ += 2;
  }
  if (at_ >= text_.size()) fail_at(begin, "this string has no end");
  ++at_;
  if (!is_utf8(result)) fail_at(begin, "this string is no UTF-8 text");
  return result;
}

std::string_view TextScanner::number() {
  skip_blanks();
  size_t end = at_;
  if (end < text_.size() && (text_[end] == '-' || text_[end] == '+')) ++end;
  const size_t digits = end;
  while (end < text_.size()) {
    const char c = text_[end];
    const bool exponent_sign = (c == '-' || c == '+') && end > digits &&
                               (text_[end - 1] == 'e' || text_[end - 1] == 'E') &&
                               std::isdigit(static_cast<unsigned char>(text_[digits]));
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.' && !exponent_sign) break;
    ++end;
  }
  // `{1...}` is no number.
  if (end == digits) fail("a number is expected here");
  const std::string_view result = text_.substr(at_, end - at_);
  at_ = end;
  return result;
}

std::string_view TextScanner::extent() {
  skip_blanks();
  const size_t begin = at_;
  int open = 0;
  while (at_ < text_.size() && text_[at_] != '\n') {
    const char c = text_[at_];
    if (open == 0 && (c == ',' || c == ']')) break;
    if (c == '(') ++open;
    if (c == ')') --open;
    ++at_;
  }
  size_t end = at_;
  while (end > begin && text_[end - 1] == ' ') --end;
  if (end == begin) fail_at(begin, "an extent is expected here");
  return text_.substr(begin, end - begin);
}

bool TextScanner::takes_repeated_bytes(size_t bytes) {
  if (bytes > repeated_bytes_left_) return false;
  repeated_bytes_left_ -= bytes;
  return true;
}

}  // namespace ortrain
