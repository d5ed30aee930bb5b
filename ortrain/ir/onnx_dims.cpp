// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/onnx_dims.h"

#include <algorithm>
#include <cctype>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

// Longer expressions are taken as one symbol, and so are longer names, which are cut.
constexpr size_t kMaxExpression = 1024;
constexpr size_t kMaxName = 256;

bool is_symbol_char(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '/';
}

// "name" or "name(anything balanced)": what expressions can hold as a factor.
bool is_factor(const std::string& symbol) {
  size_t at = 0;
  while (at < symbol.size() && is_symbol_char(symbol[at])) ++at;
  const bool number = std::all_of(symbol.begin(), symbol.begin() + static_cast<std::ptrdiff_t>(at),
                                  [](unsigned char c) { return std::isdigit(c); });
  if (at == 0 || number) return false;
  if (at == symbol.size()) return at <= kMaxName;
  int open = 0;
  for (; at < symbol.size(); ++at) {
    if (symbol[at] == '(') ++open;
    if (symbol[at] == ')') --open;
    if (open == 0) return at + 1 == symbol.size();
  }
  return false;
}

// Multiplying out parentheses takes exponential time, and Dim::str never writes any around sums.
bool has_grouping(const std::string& text) {
  int open = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '(' && open == 0 && (i == 0 || !is_symbol_char(text[i - 1]))) return true;
    if (text[i] == '(') ++open;
    if (text[i] == ')') --open;
  }
  return false;
}

}  // namespace

ExtentReader::ExtentReader(const onnx::GraphProto& graph) {
  for (const onnx::ValueInfoProto& input : graph.input()) {
    for (const auto& extent : input.type().tensor_type().shape().dim()) {
      if (extent.has_dim_param()) taken_.insert(extent.dim_param());
    }
  }
}

std::string ExtentReader::unused(std::string wanted) {
  if (wanted.size() > kMaxName) wanted.resize(kMaxName);
  std::string name = wanted;
  for (int& count = counts_[wanted]; !taken_.insert(name).second;) {
    name = str(wanted, "_", ++count);
  }
  return name;
}

std::string ExtentReader::symbol_for(const std::string& text) {
  auto [found, fresh] = symbols_.try_emplace(text);
  if (!fresh) return found->second;
  static constexpr std::string_view kHex = "0123456789abcdef";
  std::string name = "_";
  for (const char c : text.substr(0, 200)) {
    const auto byte = static_cast<unsigned char>(c);
    if (is_symbol_char(c)) {
      name += c;
    } else {
      name += str("_x", kHex[byte >> 4], kHex[byte & 15]);
    }
  }
  return found->second = unused(std::move(name));
}

Dim ExtentReader::read_text(const std::string& text) {
  if (text.size() <= kMaxExpression && !has_grouping(text)) {
    try {
      Dim dim = Dim::parse(text);
      const std::set<std::string> symbols = dim.symbols();
      if (std::all_of(symbols.begin(), symbols.end(), is_factor)) return dim;
    } catch (const ShapeError& error) {
      throw InvalidModelError(str("extent '", text, "': ", error.what()));
    }
  }
  return Dim::symbol(symbol_for(text));
}

Dim ExtentReader::read(const onnx::TensorShapeProto::Dimension& extent, const std::string& where) {
  if (!extent.has_dim_value() && extent.dim_param().empty()) {
    std::string name;
    for (const char c : where) name += is_symbol_char(c) ? c : '_';
    if (std::isdigit(static_cast<unsigned char>(name.front()))) name = "_" + name;
    return Dim::symbol(unused(std::move(name)));
  }
  const Dim dim = extent.has_dim_value() ? Dim(extent.dim_value()) : read_text(extent.dim_param());
  if (dim.is_constant() && dim.constant() < 0) {
    throw InvalidModelError(str("extent ", dim.constant(), " is negative"));
  }
  return dim;
}

}  // namespace ortrain
