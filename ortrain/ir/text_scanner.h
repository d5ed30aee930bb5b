// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ortrain {

// Whether a name can be written without quotes, and is no word of the text form.
bool is_bare_name(std::string_view name);
std::string quoted_text(std::string_view text);
std::string name_text(std::string_view name);  // bare where that is possible

// Reads the tokens of the text form. Every failure throws InvalidModelError with "line:column: ".
class TextScanner {
 public:
  explicit TextScanner(std::string_view text) : text_(text) {}

  size_t position() const { return at_; }
  void rewind(size_t position) { at_ = position; }
  // "line:column: " of a position.
  std::string place(size_t position) const;
  [[noreturn]] void fail(const std::string& message) const;
  [[noreturn]] void fail_at(size_t position, const std::string& message) const;

  bool at_end();
  // Looks past blanks and comments; '\0' at the end.
  char peek();
  bool accept(std::string_view token);  // punctuation
  void expect(std::string_view token);
  bool accept_word(std::string_view word);  // a whole bare name
  std::string_view peek_word();             // a bare name, "" if there is none
  std::string name();                       // bare or quoted
  bool at_name();
  std::string quoted_string();
  // The characters of a number, inf or nan.
  std::string_view number();
  // Everything up to ',' or ']' outside of parentheses.
  std::string_view extent();
  // Counts memory that an element and "..." ask for; false where the text has asked for too much. A
  // few characters may not ask for any amount.
  bool takes_repeated_bytes(size_t bytes);

 private:
  void skip_blanks();

  std::string_view text_;
  size_t at_ = 0;
  size_t repeated_bytes_left_ = size_t{256} << 20;
};

}  // namespace ortrain
