// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/text_values.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <utility>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/dtype_dispatch.h"

namespace ortrain {
namespace {

constexpr std::string_view kBase64 =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

std::string base64_encode(const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::string result;
  result.reserve((size + 2) / 3 * 4);
  for (size_t i = 0; i < size; i += 3) {
    uint32_t word = 0;
    for (size_t j = 0; j < 3; ++j) word = word << 8 | (i + j < size ? bytes[i + j] : 0u);
    for (size_t j = 0; j < 4; ++j) {
      result += i + j <= size ? kBase64[word >> (18 - 6 * j) & 63] : '=';
    }
  }
  return result;
}

// False when the text is no base64 of exactly `size` bytes.
bool base64_decode(std::string_view text, void* data, size_t size) {
  if (text.size() != (size + 2) / 3 * 4) return false;
  auto* bytes = static_cast<unsigned char*>(data);
  for (size_t i = 0; i < size; i += 3) {
    uint32_t word = 0;
    for (size_t j = 0; j < 4; ++j) {
      const char c = text[i / 3 * 4 + j];
      const size_t digit = i + j <= size ? kBase64.find(c) : 0;
      if (digit == std::string_view::npos || (i + j > size && c != '=')) return false;
      word = word << 6 | static_cast<uint32_t>(digit);
    }
    for (size_t j = 0; j < 3 && i + j < size; ++j) {
      bytes[i + j] = static_cast<unsigned char>(word >> (16 - 8 * j));
    }
  }
  return true;
}

template <typename T>
std::string shortest(T value) {
  std::array<char, 40> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  return std::string(buffer.data(), end);
}

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;
template <typename T>
constexpr bool kIsFloatElement = std::is_floating_point_v<T> || kIsHalf<T>;
template <typename T>
using BitsOf = std::conditional_t<sizeof(T) == 2, uint16_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

template <typename T>
T plain_nan() {
  return T(std::numeric_limits<ComputeType<T>>::quiet_NaN());
}

template <typename T>
std::string element_text(const T& element) {
  if constexpr (std::is_same_v<T, bool>) {
    return element ? "true" : "false";
  } else if constexpr (kIsFloatElement<T>) {
    const auto value = static_cast<ComputeType<T>>(element);
    const auto bits = std::bit_cast<BitsOf<T>>(element);
    if (std::isnan(value)) {
      if (bits == std::bit_cast<BitsOf<T>>(plain_nan<T>())) return "nan";
      std::array<char, 20> buffer;
      const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), bits, 16).ptr;
      return "0x" + std::string(buffer.data(), end);
    }
    return shortest(value);
  } else {
    return shortest(element);
  }
}

template <typename T>
bool read_number(std::string_view text, T& value, int base = 10) {
  if (text.starts_with('+')) text.remove_prefix(1);
  std::from_chars_result result{};
  if constexpr (std::is_floating_point_v<T>) {
    result = std::from_chars(text.data(), text.data() + text.size(), value);
  } else {
    result = std::from_chars(text.data(), text.data() + text.size(), value, base);
  }
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

template <typename T>
T parse_element(TextScanner& scanner) {
  scanner.peek();
  const size_t begin = scanner.position();
  const std::string_view text = scanner.number();
  if constexpr (std::is_same_v<T, bool>) {
    if (text == "true" || text == "1") return true;
    if (text == "false" || text == "0") return false;
  } else if constexpr (kIsFloatElement<T>) {
    if (text.starts_with("0x")) {
      BitsOf<T> bits = 0;
      if (read_number(text.substr(2), bits, 16)) return std::bit_cast<T>(bits);
    } else if (ComputeType<T> value = 0; read_number(text, value)) {
      if (std::isnan(value)) return plain_nan<T>();
      return T(value);
    }
  } else {
    T value = 0;
    if (read_number(text, value)) return value;
  }
  scanner.fail_at(begin, str("'", text, "' is no element of this type"));
}

template <typename T>
std::string list_text(const T* elements, size_t count) {
  std::string result = "{";
  const bool uniform = count > 4 && std::all_of(elements, elements + count, [&](const T& element) {
                         return std::memcmp(&element, elements, sizeof(T)) == 0;
                       });
  if (uniform) return result + element_text(elements[0]) + ", ...}";
  for (size_t i = 0; i < count; ++i) result += (i ? ", " : "") + element_text(elements[i]);
  return result + "}";
}

// The elements as written; a last one that is repeated sets `repeats`. bool has no std::vector.
template <typename T>
std::deque<T> parse_elements(TextScanner& scanner, size_t count, bool& repeats) {
  std::deque<T> elements;
  scanner.expect("{");
  while (!scanner.accept("}")) {
    if (!elements.empty()) scanner.expect(",");
    if (scanner.accept("...")) {
      if (elements.empty()) {
        scanner.fail("there is no element to repeat, or this constant was elided");
      }
      if (!scanner.takes_repeated_bytes(bytes_of<T>(count).value())) {
        scanner.fail("this constant is too large, or all that repeat an element are together");
      }
      repeats = true;
      scanner.expect("}");
      return elements;
    }
    scanner.peek();
    const size_t begin = scanner.position();
    elements.push_back(parse_element<T>(scanner));
    if (elements.size() > count) {
      scanner.fail_at(begin, str("the tensor has ", count, " elements only"));
    }
  }
  if (elements.size() != count) {
    scanner.fail(str("the tensor has ", count, " elements, ", elements.size(), " are given"));
  }
  return elements;
}

template <typename T>
TensorData parse_list(TextScanner& scanner, DType dtype, const Dims& dims) {
  const auto count = static_cast<size_t>(num_elements(dims));
  bool repeats = false;
  std::deque<T> elements;
  if (dims.empty() && scanner.peek() != '{') {
    elements.push_back(parse_element<T>(scanner));
  } else {
    elements = parse_elements<T>(scanner, count, repeats);
  }
  void* data = nullptr;
  TensorData tensor = TensorData::allocate(dtype, dims, &data);
  auto* destination = static_cast<T*>(data);
  std::copy(elements.begin(), elements.end(), destination);
  if (repeats) std::fill(destination + elements.size(), destination + count, elements.back());
  return tensor;
}

TensorData parse_raw(TextScanner& scanner, DType dtype, const Dims& dims) {
  const size_t begin = scanner.position();
  const std::string text = scanner.quoted_string();
  const auto count = static_cast<size_t>(num_elements(dims));
  const bool fits = count <= text.size() && text.size() == (count * size_of(dtype) + 2) / 3 * 4;
  void* data = nullptr;
  TensorData tensor;
  if (fits) tensor = TensorData::allocate(dtype, dims, &data);
  if (!fits || !base64_decode(text, data, tensor.bytes())) {
    scanner.fail_at(begin, str("this is no base64 text of ", count, " elements"));
  }
  const auto* bytes = static_cast<const unsigned char*>(data);
  if (dtype == DType::boolean &&
      std::any_of(bytes, bytes + count, [](unsigned char byte) { return byte > 1; })) {
    scanner.fail_at(begin, "a bool is neither 0 nor 1");
  }
  return tensor;
}

bool is_uniform(const TensorData& tensor) {
  const size_t size = size_of(tensor.dtype());
  const auto* bytes = static_cast<const char*>(tensor.data());
  for (size_t at = size; at < tensor.bytes(); at += size) {
    if (std::memcmp(bytes, bytes + at, size) != 0) return false;
  }
  return tensor.bytes() > 0;
}

template <typename T, typename Print>
std::string joined(const std::vector<T>& values, const Print& print) {
  std::string result = "[";
  for (size_t i = 0; i < values.size(); ++i) result += (i ? ", " : "") + print(values[i]);
  return result + "]";
}

std::string attribute_text(const Attribute& attribute, const TextOptions& options) {
  struct Printer {
    const TextOptions& options;
    std::string operator()(int64_t value) const { return std::to_string(value); }
    std::string operator()(double value) const { return float_text(value); }
    std::string operator()(const std::string& value) const { return quoted_text(value); }
    std::string operator()(const std::vector<int64_t>& values) const {
      return joined(values, [](int64_t value) { return std::to_string(value); });
    }
    std::string operator()(const std::vector<double>& values) const {
      return joined(values, float_text);
    }
    std::string operator()(const std::vector<std::string>& values) const {
      return joined(values, [](const std::string& value) { return quoted_text(value); });
    }
    std::string operator()(const TensorData& value) const { return tensor_text(value, options); }
  };
  return std::visit(Printer{options}, attribute);
}

std::optional<AttributeKind> kind_of(const OpDef* def, const std::string& name) {
  const FormalAttribute* formal = def == nullptr ? nullptr : def->find_attribute(name);
  if (formal == nullptr) return std::nullopt;
  if (!formal->has_default) return formal->kind;
  return static_cast<AttributeKind>(formal->default_value.index());
}

AttributeKind parse_kind(TextScanner& scanner) {
  static constexpr std::array<std::string_view, 7> kKinds{"int",    "float",   "string", "ints",
                                                          "floats", "strings", "tensor"};
  for (size_t i = 0; i < kKinds.size(); ++i) {
    if (scanner.accept_word(kKinds[i])) return static_cast<AttributeKind>(i);
  }
  scanner.fail("int, float, string, ints, floats, strings or tensor is expected here");
}

int64_t parse_int(TextScanner& scanner) {
  scanner.peek();
  const size_t begin = scanner.position();
  const std::string_view text = scanner.number();
  int64_t value = 0;
  if (!read_number(text, value)) scanner.fail_at(begin, str("'", text, "' is no 64-bit integer"));
  return value;
}

double parse_float(TextScanner& scanner) {
  scanner.peek();
  const size_t begin = scanner.position();
  const std::string_view text = scanner.number();
  double value = 0;
  if (!read_number(text, value)) scanner.fail_at(begin, str("'", text, "' is no number"));
  return value;
}

template <typename T, typename ParseOne>
std::vector<T> parse_items(TextScanner& scanner, const ParseOne& parse_one) {
  std::vector<T> values;
  scanner.expect("[");
  while (!scanner.accept("]")) {
    if (!values.empty()) scanner.expect(",");
    values.push_back(parse_one(scanner));
  }
  return values;
}

// The kind that the text itself shows.
AttributeKind visible_kind(TextScanner& scanner) {
  if (at_tensor(scanner)) return AttributeKind::tensor;
  const size_t begin = scanner.position();
  const bool list = scanner.accept("[");
  AttributeKind kind = AttributeKind::int_;
  if (list && scanner.peek() == ']')
    scanner.fail("an empty list needs its kind: `name: kind = []`");
  if (scanner.peek() == '"') {
    kind = AttributeKind::string_;
  } else {
    // One float among the numbers makes all of them floats.
    do {
      const std::string_view number = scanner.number();
      if (number.find_first_of(".eEn") != std::string_view::npos) kind = AttributeKind::float_;
    } while (list && scanner.accept(","));
  }
  scanner.rewind(begin);
  return list ? static_cast<AttributeKind>(static_cast<int>(kind) + 3) : kind;
}

Attribute parse_attribute(TextScanner& scanner, AttributeKind kind) {
  switch (kind) {
    case AttributeKind::int_:
      return parse_int(scanner);
    case AttributeKind::float_:
      return parse_float(scanner);
    case AttributeKind::string_:
      return scanner.quoted_string();
    case AttributeKind::ints:
      return parse_items<int64_t>(scanner, parse_int);
    case AttributeKind::floats:
      return parse_items<double>(scanner, parse_float);
    case AttributeKind::strings:
      return parse_items<std::string>(scanner, [](TextScanner& s) { return s.quoted_string(); });
    case AttributeKind::tensor:
      return parse_tensor(scanner);
  }
  scanner.fail("an attribute is expected here");
}

}  // namespace

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  std::string text = shortest(value);
  return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
}

std::string extent_text(const Dim& dim) {
  std::string text = dim.str();
  int open = 0;
  bool clean = Dim::parse(text) == dim;
  for (const char c : text) {
    if (c == '(') ++open;
    if (c == ')') --open;
    clean = clean && open >= 0 && c != '\n' && c != '"' && (open > 0 || (c != ',' && c != ']'));
  }
  return clean && open == 0 && !text.empty() ? text : quoted_text(text);
}

std::string shape_text(const Shape& shape) { return joined(shape, extent_text); }

std::string tensor_text(const TensorData& tensor, const TextOptions& options) {
  std::string result(name_of(tensor.dtype()));
  result += shape_text(to_shape(tensor.dims())) + " ";
  const auto count = static_cast<size_t>(tensor.numel());
  if (count > options.max_listed_elements && !is_uniform(tensor)) {
    if (options.elide_large_constants) return result + "{...}";
    return result + "b64 \"" + base64_encode(tensor.data(), tensor.bytes()) + "\"";
  }
  return result + dispatch_all(tensor.dtype(), [&](auto tag) {
           using T = typename decltype(tag)::type;
           return list_text(tensor.data_as<T>(), count);
         });
}

std::string attributes_text(const Attributes& attributes, const TextOptions& options) {
  if (attributes.empty()) return "";
  std::string result = " <";
  for (const auto& [name, attribute] : attributes) {
    const std::string value = attribute_text(attribute, options);
    if (result.size() > 2) result += ", ";
    result += name_text(name);
    if (value == "[]") result += str(": ", attribute_kind(attribute));
    result += " = " + value;
  }
  return result + ">";
}

DType parse_dtype(TextScanner& scanner) {
  const std::string_view word = scanner.peek_word();
  const std::optional<DType> dtype = dtype_from_name(word);
  if (!dtype) scanner.fail("an element type is expected here");
  scanner.accept_word(word);
  return *dtype;
}

bool at_tensor(TextScanner& scanner) { return dtype_from_name(scanner.peek_word()).has_value(); }

// Of an extent; what graphs print is shorter.
constexpr size_t kMaxExtent = size_t{1} << 17;

Shape parse_shape(TextScanner& scanner) {
  Shape shape;
  if (!scanner.accept("[")) return shape;
  while (!scanner.accept("]")) {
    if (!shape.empty()) scanner.expect(",");
    const bool quoted = scanner.peek() == '"';
    const size_t begin = scanner.position();
    try {
      if (quoted) {
        shape.push_back(Dim::symbol(scanner.quoted_string()));
        continue;
      }
      const std::string_view text = scanner.extent();
      if (text.size() > kMaxExtent) throw ShapeError("an extent is too long");
      shape.push_back(Dim::parse(text));
    } catch (const ShapeError& error) {
      scanner.fail_at(begin, error.what());
    }
    if (shape.back().is_constant() && shape.back().constant() < 0) {
      scanner.fail_at(begin, "an extent is negative");
    }
  }
  return shape;
}

TensorData parse_tensor(TextScanner& scanner) {
  const DType dtype = parse_dtype(scanner);
  scanner.peek();
  const size_t begin = scanner.position();
  const Shape shape = parse_shape(scanner);
  if (!is_constant(shape)) scanner.fail_at(begin, "the extents of a constant are integers");
  const Dims dims = to_dims(shape);
  try {
    num_elements(dims);
  } catch (const ShapeError& error) {
    scanner.fail_at(begin, error.what());
  }
  if (scanner.accept_word("b64")) return parse_raw(scanner, dtype, dims);
  return dispatch_all(dtype, [&](auto tag) {
    return parse_list<typename decltype(tag)::type>(scanner, dtype, dims);
  });
}

Attributes parse_attributes(TextScanner& scanner, const OpDef* def) {
  Attributes attributes;
  if (!scanner.accept("<")) return attributes;
  while (!scanner.accept(">")) {
    if (!attributes.empty()) scanner.expect(",");
    scanner.peek();
    const size_t begin = scanner.position();
    const std::string name = scanner.name();
    std::optional<AttributeKind> kind = kind_of(def, name);
    const bool stated = scanner.accept(":");
    if (stated) kind = parse_kind(scanner);
    scanner.expect("=");
    // The schema only decides what the text leaves open: an integer may be meant as a float, and
    // an empty list as a list of anything. Inference reports the rest.
    const bool open = kind == AttributeKind::float_ || kind == AttributeKind::floats;
    const size_t value_begin = scanner.position();
    const bool empty_list = scanner.accept("[") && scanner.accept("]");
    scanner.rewind(value_begin);
    if (!stated && !(empty_list && kind)) {
      const AttributeKind visible = visible_kind(scanner);
      const bool widens = open && static_cast<int>(visible) + 1 == static_cast<int>(*kind);
      if (!widens) kind = visible;
    }
    Attribute value = parse_attribute(scanner, *kind);
    if (!attributes.emplace(name, std::move(value)).second) {
      scanner.fail_at(begin, str("attribute '", name, "' is given twice"));
    }
  }
  return attributes;
}

}  // namespace ortrain
