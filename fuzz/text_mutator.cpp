// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Changes graphs as text word by word and line by line.
#include <algorithm>
#include <cctype>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz/byte_source.h"
#include "fuzz/targets.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::fuzz {
namespace {

// Words (names, numbers), and each other character by itself.
std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> tokens;
  const auto is_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.';
  };
  for (size_t at = 0; at < text.size();) {
    size_t end = at + 1;
    while (is_word(text[at]) && end < text.size() && is_word(text[end])) ++end;
    tokens.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return tokens;
}

bool is_number(const std::string& token) {
  return std::isdigit(static_cast<unsigned char>(token[0])) != 0;
}

bool is_word(const std::string& token) {
  return std::isalpha(static_cast<unsigned char>(token[0])) != 0;
}

std::string drawn_operator(Numbers& numbers) {
  static const std::vector<std::string> all = [] {
    std::vector<std::string> names;
    for (const auto& defs : {op_registry().all(), op_registry().composites()}) {
      for (const OpDef* def : defs) {
        names.push_back(def->domain.empty() ? def->name : def->domain + "::" + def->name);
      }
    }
    return names;
  }();
  return all[numbers.below(all.size())];
}

class TextMutator {
 public:
  TextMutator(std::string_view text, uint64_t seed) : tokens_(split(text)), numbers_(seed) {}

  std::string changed() {
    const size_t edits = 1 + numbers_.below(3);
    for (size_t i = 0; i < edits && !tokens_.empty(); ++i) change_once();
    std::string result;
    for (const std::string& token : tokens_) result += token;
    return result;
  }

 private:
  void change_once() {
    switch (numbers_.below(8)) {
      case 0:
      case 1:
        return replace(is_number, [&] { return drawn_number(); });
      case 2:
        return swap_words();
      case 3:
        // An operator stands behind a '='.
        return replace_behind("=", drawn_operator(numbers_));
      case 4:
        return replace(is_word, [&] { return drawn_keyword(); });
      case 5:
        return copy_line();
      case 6:
        return drop_line();
      default:
        return insert();
    }
  }

  std::string drawn_number() {
    if (numbers_.below(2) == 0) return std::to_string(numbers_.below(9));
    const std::string number = std::to_string(numbers_.extreme());
    return numbers_.below(4) == 0 ? number + ".5" : number;
  }

  std::string drawn_keyword() {
    constexpr const char* kKeywords[] = {
        "float32",      "float64",       "float16",  "bfloat16",
        "int64",        "int32",         "int8",     "uint8",
        "bool",         "uint64",        "grad",     "parameter",
        "buffer",       "seed",          "gradient", "state",
        "state_update", "derived",       "backward", "forward",
        "const",        "buffer_update", "n",        "m",
        "2*n",          "inf",           "nan",      "input_update",
        "b64",          "token",         "n*m + 1"};
    return kKeywords[numbers_.below(std::size(kKeywords))];
  }

  std::vector<size_t> places(bool (*fits)(const std::string&)) const {
    std::vector<size_t> found;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (fits(tokens_[i])) found.push_back(i);
    }
    return found;
  }

  template <class Draw>
  void replace(bool (*fits)(const std::string&), const Draw& draw) {
    const std::vector<size_t> found = places(fits);
    if (!found.empty()) tokens_[found[numbers_.below(found.size())]] = draw();
  }

  void swap_words() {
    const std::vector<size_t> found = places(is_word);
    if (found.size() < 2) return;
    std::swap(tokens_[found[numbers_.below(found.size())]],
              tokens_[found[numbers_.below(found.size())]]);
  }

  void replace_behind(std::string_view sign, const std::string& word) {
    std::vector<size_t> found;
    for (size_t i = 0; i + 2 < tokens_.size(); ++i) {
      if (tokens_[i] == sign && tokens_[i + 1] == " " && is_word(tokens_[i + 2])) {
        found.push_back(i + 2);
      }
    }
    if (!found.empty()) tokens_[found[numbers_.below(found.size())]] = word;
  }

  // Begin and end of a line, with its end.
  std::pair<size_t, size_t> drawn_line() {
    size_t begin = numbers_.below(tokens_.size());
    while (begin > 0 && tokens_[begin - 1] != "\n") --begin;
    size_t end = begin;
    while (end < tokens_.size() && tokens_[end] != "\n") ++end;
    return {begin, std::min(end + 1, tokens_.size())};
  }

  void copy_line() {
    const auto [begin, end] = drawn_line();
    std::vector<std::string> line(tokens_.begin() + static_cast<ptrdiff_t>(begin),
                                  tokens_.begin() + static_cast<ptrdiff_t>(end));
    // A result of its own, so that the copy is not refused for its name.
    for (std::string& token : line) {
      if (!is_word(token)) continue;
      token += std::to_string(numbers_.below(10));
      break;
    }
    tokens_.insert(tokens_.begin() + static_cast<ptrdiff_t>(end), line.begin(), line.end());
  }

  void drop_line() {
    const auto [begin, end] = drawn_line();
    tokens_.erase(tokens_.begin() + static_cast<ptrdiff_t>(begin),
                  tokens_.begin() + static_cast<ptrdiff_t>(end));
  }

  void insert() {
    constexpr const char* kPieces[] = {"[", "]", "{", "}", "(",  ")", "<", ">",  ",", "=",
                                       ":", "~", "@", "-", "\"", "#", "_", "\n", "*", "..."};
    tokens_.insert(tokens_.begin() + static_cast<ptrdiff_t>(numbers_.below(tokens_.size() + 1)),
                   kPieces[numbers_.below(std::size(kPieces))]);
  }

  std::vector<std::string> tokens_;
  Numbers numbers_;
};

}  // namespace

size_t mutate_text(uint8_t* data, size_t size, size_t limit, uint64_t seed) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::string changed = TextMutator(text, seed).changed();
  if (changed.empty() || changed.size() > limit) return 0;
  std::memcpy(data, changed.data(), changed.size());
  return changed.size();
}

}  // namespace ortrain::fuzz
