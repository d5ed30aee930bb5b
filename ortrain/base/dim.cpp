// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/dim.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <sstream>

#include "ortrain/base/error.h"

namespace ortrain {

namespace {

// Graphs of real models stay far below; a file could ask for expressions without end, and for
// many of them.
constexpr size_t kMaxTerms = 512;
constexpr size_t kMaxDegree = 64;
constexpr size_t kMaxSymbolLength = 4096;
constexpr size_t kMaxWeight = size_t{1} << 16;

[[noreturn]] void throw_overflow() { throw ShapeError("an extent is too large for 64 bits"); }

[[noreturn]] void throw_complicated() { throw ShapeError("an extent is too complicated"); }

}  // namespace

Dim Dim::symbol(std::string name) {
  if (name.size() > kMaxSymbolLength) throw_complicated();
  return from_terms({{Monomial{std::move(name)}, 1}});
}

Dim Dim::from_terms(Terms terms) {
  std::erase_if(terms, [](const auto& term) { return term.second == 0; });
  if (terms.empty()) return Dim(0);
  if (terms.size() == 1 && terms.begin()->first.empty()) return Dim(terms.begin()->second);
  Dim result;
  result.terms_ = std::make_shared<const Terms>(std::move(terms));
  if (result.weight() > kMaxWeight) throw_complicated();
  return result;
}

size_t Dim::weight() const {
  if (is_constant()) return 0;
  constexpr size_t kOfTerm = 64, kOfSymbol = sizeof(std::string);
  size_t weight = 0;
  for (const auto& [monomial, coefficient] : *terms_) {
    weight += kOfTerm;
    for (const std::string& symbol : monomial) weight += kOfSymbol + symbol.size();
  }
  return weight;
}

Dim::Terms Dim::terms() const {
  if (terms_) return *terms_;
  if (value_ == 0) return {};
  return {{Monomial{}, value_}};
}

bool operator==(const Dim& a, const Dim& b) {
  if (a.is_constant() != b.is_constant()) return false;
  if (a.is_constant()) return a.value_ == b.value_;
  return a.terms_ == b.terms_ || *a.terms_ == *b.terms_;
}

std::set<std::string> Dim::symbols() const {
  std::set<std::string> result;
  for (const auto& [monomial, coefficient] : terms())
    result.insert(monomial.begin(), monomial.end());
  return result;
}

namespace {

int64_t add_checked(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) throw_overflow();
  return sum;
}

int64_t subtract_checked(int64_t a, int64_t b) {
  int64_t difference = 0;
  if (__builtin_sub_overflow(a, b, &difference)) throw_overflow();
  return difference;
}

int64_t multiply_checked(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) throw_overflow();
  return product;
}

}  // namespace

Dim operator+(const Dim& a, const Dim& b) {
  if (a.is_constant() && b.is_constant()) return Dim(add_checked(a.value_, b.value_));
  Dim::Terms sum = a.terms();
  for (const auto& [monomial, coefficient] : b.terms()) {
    int64_t& total = sum[monomial];
    total = add_checked(total, coefficient);
  }
  if (sum.size() > kMaxTerms) throw_complicated();
  return Dim::from_terms(std::move(sum));
}

Dim operator-(const Dim& a, const Dim& b) {
  if (a.is_constant() && b.is_constant()) return Dim(subtract_checked(a.value_, b.value_));
  Dim::Terms difference = a.terms();
  for (const auto& [monomial, coefficient] : b.terms()) {
    int64_t& total = difference[monomial];
    total = subtract_checked(total, coefficient);
  }
  if (difference.size() > kMaxTerms) throw_complicated();
  return Dim::from_terms(std::move(difference));
}

Dim operator*(const Dim& a, const Dim& b) {
  if (a.is_constant() && b.is_constant()) return Dim(multiply_checked(a.value_, b.value_));
  const Dim::Terms left_terms = a.terms();
  const Dim::Terms right_terms = b.terms();
  if (left_terms.size() * right_terms.size() > kMaxTerms) throw_complicated();
  Dim::Terms product;
  for (const auto& [left, left_coefficient] : left_terms) {
    for (const auto& [right, right_coefficient] : right_terms) {
      if (left.size() + right.size() > kMaxDegree) throw_complicated();
      Dim::Monomial monomial = left;
      monomial.insert(monomial.end(), right.begin(), right.end());
      std::sort(monomial.begin(), monomial.end());
      int64_t& total = product[std::move(monomial)];
      total = add_checked(total, multiply_checked(left_coefficient, right_coefficient));
    }
  }
  return Dim::from_terms(std::move(product));
}

namespace {

int64_t floor_div_constants(int64_t a, int64_t b) {
  if (b == 0) throw ShapeError("division of an extent by zero");
  if (b == -1) return subtract_checked(0, a);
  int64_t quotient = a / b;
  if ((a % b != 0) && ((a < 0) != (b < 0))) --quotient;
  return quotient;
}

Dim opaque(std::string_view function, const Dim& a, const Dim& b) {
  return Dim::symbol(str(function, "(", a.str(), ", ", b.str(), ")"));
}

}  // namespace

Dim floor_div(const Dim& a, const Dim& b) {
  if (a.is_constant() && b.is_constant()) return Dim(floor_div_constants(a.value_, b.value_));
  if (b.is(1)) return a;
  if (a == b) return Dim(1);
  // A divisor of one term divides exactly when it divides every term.
  const Dim::Terms divisor = b.terms();
  if (divisor.size() == 1) {
    const auto& [symbols, coefficient] = *divisor.begin();
    Dim::Terms quotient;
    bool exact = true;
    for (const auto& [monomial, c] : a.terms()) {
      Dim::Monomial rest;
      if ((coefficient == -1 && c == INT64_MIN) || c % coefficient != 0 ||
          !std::includes(monomial.begin(), monomial.end(), symbols.begin(), symbols.end())) {
        exact = false;
        break;
      }
      std::set_difference(monomial.begin(), monomial.end(), symbols.begin(), symbols.end(),
                          std::back_inserter(rest));
      quotient[rest] += c / coefficient;
    }
    if (exact) return Dim::from_terms(std::move(quotient));
  }
  return opaque("floordiv", a, b);
}

Dim ceil_div(const Dim& a, const Dim& b) {
  if (a.is_constant() && b.is_constant()) {
    return Dim(subtract_checked(0, floor_div_constants(subtract_checked(0, a.value_), b.value_)));
  }
  return floor_div(a + b - Dim(1), b);
}

Dim min(const Dim& a, const Dim& b) {
  if (a == b) return a;
  // The difference of two integers may be none.
  if (a.is_constant() && b.is_constant()) return a.value_ < b.value_ ? a : b;
  const Dim difference = a - b;
  if (difference.is_constant()) return difference.constant() <= 0 ? a : b;
  return opaque("min", a, b);
}

Dim max(const Dim& a, const Dim& b) {
  if (a == b) return a;
  if (a.is_constant() && b.is_constant()) return a.value_ > b.value_ ? a : b;
  const Dim difference = a - b;
  if (difference.is_constant()) return difference.constant() >= 0 ? a : b;
  return opaque("max", a, b);
}

std::string Dim::str() const {
  if (is_constant()) return std::to_string(value_);
  std::ostringstream out;
  bool first = true;
  // The constant term sorts first in the map; it reads better last.
  std::vector<std::pair<Monomial, int64_t>> ordered(terms_->begin(), terms_->end());
  if (ordered.front().first.empty())
    std::rotate(ordered.begin(), ordered.begin() + 1, ordered.end());
  for (const auto& [monomial, coefficient] : ordered) {
    // Unsigned, so that the smallest integer has a magnitude too.
    const uint64_t magnitude =
        coefficient < 0 ? -static_cast<uint64_t>(coefficient) : static_cast<uint64_t>(coefficient);
    if (first) {
      out << (coefficient < 0 ? "-" : "");
    } else {
      out << (coefficient < 0 ? " - " : " + ");
    }
    first = false;
    if (monomial.empty() || magnitude != 1) out << magnitude << (monomial.empty() ? "" : "*");
    for (size_t i = 0; i < monomial.size(); ++i) out << (i ? "*" : "") << monomial[i];
  }
  return out.str();
}

namespace {

// expression := product (('+'|'-') product)*; product := factor ('*' factor)*;
// factor := integer | identifier ['(' balanced ')'] | '(' expression ')' | '-' factor
class DimParser {
 public:
  explicit DimParser(std::string_view text) : text_(text) {}

  std::optional<Dim> parse() {
    std::optional<Dim> result = expression(0);
    skip_space();
    return result && at_ == text_.size() ? result : std::nullopt;
  }

 private:
  static constexpr int kMaxDepth = 64;

  void skip_space() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  bool accept(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  std::optional<Dim> expression(int depth) {
    std::optional<Dim> sum = product(depth);
    while (sum) {
      const bool plus = accept('+');
      if (!plus && !accept('-')) return sum;
      std::optional<Dim> right = product(depth, /*negative=*/!plus);
      if (!right) return std::nullopt;
      sum = *sum + *right;
    }
    return sum;
  }
  // `negative`: of what is there. The sign goes to the number, as the smallest is no number
  // without it.
  std::optional<Dim> product(int depth, bool negative = false) {
    std::optional<Dim> result = factor(depth, negative);
    while (result && accept('*')) {
      std::optional<Dim> right = factor(depth);
      if (!right) return std::nullopt;
      result = *result * *right;
    }
    return result;
  }
  std::optional<Dim> factor(int depth, bool negative = false) {
    if (depth > kMaxDepth) return std::nullopt;
    const auto with_sign = [&](const Dim& dim) { return negative ? Dim(0) - dim : dim; };
    if (accept('-')) return factor(depth + 1, !negative);
    if (accept('(')) {
      std::optional<Dim> inner = expression(depth + 1);
      return inner && accept(')') ? std::optional(with_sign(*inner)) : std::nullopt;
    }
    skip_space();
    const size_t begin = at_;
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) ||
                                  text_[at_] == '_' || text_[at_] == '.' || text_[at_] == '/')) {
      ++at_;
    }
    if (begin == at_) return std::nullopt;
    const std::string_view token = text_.substr(begin, at_ - begin);
    if (std::all_of(token.begin(), token.end(), [](unsigned char c) { return std::isdigit(c); })) {
      int64_t value = 0;
      const std::string number = (negative ? "-" : "") + std::string(token);
      const auto [end, error] =
          std::from_chars(number.data(), number.data() + number.size(), value);
      return error == std::errc() ? std::optional<Dim>(value) : std::nullopt;
    }
    if (at_ < text_.size() && text_[at_] == '(') {  // an opaque part, kept as its text
      int open = 0;
      do {
        if (text_[at_] == '(') ++open;
        if (text_[at_] == ')') --open;
        ++at_;
      } while (at_ < text_.size() && open > 0);
      if (open != 0) return std::nullopt;
    }
    return with_sign(Dim::symbol(std::string(text_.substr(begin, at_ - begin))));
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

Dim Dim::parse(std::string_view text) {
  std::optional<Dim> result = DimParser(text).parse();
  return result ? *result : Dim::symbol(std::string(text));
}

std::optional<int64_t> Dim::evaluate(const std::map<std::string, int64_t>& bindings) const {
  if (is_constant()) return value_;
  int64_t sum = 0;
  for (const auto& [monomial, coefficient] : *terms_) {
    int64_t product = coefficient;
    for (const std::string& name : monomial) {
      auto found = bindings.find(name);
      if (found == bindings.end()) return std::nullopt;
      product = multiply_checked(product, found->second);
    }
    sum = add_checked(sum, product);
  }
  return sum;
}

std::string shape_str(const Shape& shape) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < shape.size(); ++i) out << (i ? ", " : "") << shape[i].str();
  out << "]";
  return out.str();
}

std::string dims_str(const Dims& dims) { return shape_str(to_shape(dims)); }

bool is_constant(const Shape& shape) {
  return std::all_of(shape.begin(), shape.end(), [](const Dim& d) { return d.is_constant(); });
}

Dim num_elements(const Shape& shape) {
  Dim product(1);
  for (const Dim& dim : shape) product = product * dim;
  return product;
}

int64_t num_elements(const Dims& dims) {
  int64_t product = 1;
  bool empty = false;
  for (int64_t dim : dims) {
    if (dim < 0) throw ShapeError(str("negative extent in shape ", dims_str(dims)));
    empty = empty || dim == 0;
  }
  if (empty) return 0;
  for (int64_t dim : dims) {
    if (__builtin_mul_overflow(product, dim, &product)) {
      throw ShapeError(str("the number of elements of shape ", dims_str(dims), " overflows"));
    }
  }
  return product;
}

Shape to_shape(const Dims& dims) { return Shape(dims.begin(), dims.end()); }

Dims to_dims(const Shape& shape) {
  Dims dims;
  dims.reserve(shape.size());
  for (const Dim& dim : shape) {
    check(dim.is_constant(), "a concrete shape is needed here");
    dims.push_back(dim.constant());
  }
  return dims;
}

Dim broadcast(const Dim& a, const Dim& b) {
  if (a == b || b.is(1)) return a;
  if (a.is(1)) return b;
  if (a.is_constant() && b.is_constant()) {
    throw ShapeError(str("extents ", a.constant(), " and ", b.constant(), " do not broadcast"));
  }
  // A symbol beside an integer above 1 must have that value when it runs.
  if (a.is_constant()) return a;
  if (b.is_constant()) return b;
  return opaque("broadcast", a, b);
}

Shape broadcast(const Shape& a, const Shape& b) {
  const size_t rank = std::max(a.size(), b.size());
  Shape result(rank);
  for (size_t i = 0; i < rank; ++i) {
    const Dim left = i + a.size() >= rank ? a[i + a.size() - rank] : Dim(1);
    const Dim right = i + b.size() >= rank ? b[i + b.size() - rank] : Dim(1);
    try {
      result[i] = broadcast(left, right);
    } catch (const ShapeError&) {
      throw ShapeError(str("shapes ", shape_str(a), " and ", shape_str(b), " do not broadcast"));
    }
  }
  return result;
}

Dims broadcast(const Dims& a, const Dims& b) {
  return to_dims(broadcast(to_shape(a), to_shape(b)));
}

Dims strides_of(const Dims& dims) {
  Dims strides(dims.size());
  int64_t stride = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    strides[i] = stride;
    // Without elements, extents may be of any size.
    if (i > 0 && __builtin_mul_overflow(stride, dims[i], &stride)) {
      throw ShapeError(str("the strides of shape ", dims_str(dims), " leave int64"));
    }
  }
  return strides;
}

int64_t normalize_axis(int64_t axis, size_t rank) {
  const int64_t signed_rank = static_cast<int64_t>(rank);
  if (axis < -signed_rank || axis >= signed_rank) {
    throw ShapeError(str("axis ", axis, " is out of range for rank ", rank));
  }
  return axis < 0 ? axis + signed_rank : axis;
}

}  // namespace ortrain
