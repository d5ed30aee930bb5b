// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace ortrain {

// One extent of a shape: an integer, or a polynomial with integer coefficients over named symbols
// ("2*s0*s1 + 3"). What is no polynomial (a floor division, a maximum) becomes one opaque symbol
// whose name is its text, so equal expressions still compare equal. Arithmetic that leaves int64
// throws ShapeError, and so does an expression of more than 64 kilobytes.
class Dim {
 public:
  Dim() = default;
  Dim(int64_t value) : value_(value) {}  // NOLINT: implicit on purpose, dims are mostly integers

  static Dim symbol(std::string name);
  // Accepts what str() writes; any other text becomes one opaque symbol.
  static Dim parse(std::string_view text);

  bool is_constant() const { return terms_ == nullptr; }
  // The value of a constant; check is_constant() first.
  int64_t constant() const { return value_; }
  bool is(int64_t value) const { return is_constant() && value_ == value; }
  std::string str() const;
  // The symbols it depends on; an opaque part is one symbol.
  std::set<std::string> symbols() const;
  // About how many bytes it takes beside itself; those of an integer are 0.
  size_t weight() const;

  // Puts integers for symbols; nullopt if a symbol (or an opaque part) is not bound.
  std::optional<int64_t> evaluate(const std::map<std::string, int64_t>& bindings) const;

  friend bool operator==(const Dim& a, const Dim& b);
  friend Dim operator+(const Dim& a, const Dim& b);
  friend Dim operator-(const Dim& a, const Dim& b);
  friend Dim operator*(const Dim& a, const Dim& b);
  // Floor division; exact where the polynomial allows it.
  friend Dim floor_div(const Dim& a, const Dim& b);
  friend Dim ceil_div(const Dim& a, const Dim& b);
  friend Dim min(const Dim& a, const Dim& b);
  friend Dim max(const Dim& a, const Dim& b);

 private:
  using Monomial = std::vector<std::string>;  // sorted symbols; empty = the constant term
  using Terms = std::map<Monomial, int64_t>;  // no zero coefficients
  static Dim from_terms(Terms terms);
  Terms terms() const;

  int64_t value_ = 0;
  std::shared_ptr<const Terms> terms_;  // null: constant
};

bool operator==(const Dim& a, const Dim& b);
Dim operator+(const Dim& a, const Dim& b);
Dim operator-(const Dim& a, const Dim& b);
Dim operator*(const Dim& a, const Dim& b);
Dim floor_div(const Dim& a, const Dim& b);
Dim ceil_div(const Dim& a, const Dim& b);
Dim min(const Dim& a, const Dim& b);
Dim max(const Dim& a, const Dim& b);

// A shape with possibly symbolic extents; the rank is always known.
using Shape = std::vector<Dim>;
// A concrete shape.
using Dims = std::vector<int64_t>;
// Axes that a tensor from outside may have.
inline constexpr size_t kMaxRank = 64;

std::string shape_str(const Shape& shape);
std::string dims_str(const Dims& dims);
bool is_constant(const Shape& shape);
Dim num_elements(const Shape& shape);
// Product of `dims`; throws ShapeError on a negative extent or if the product overflows int64.
int64_t num_elements(const Dims& dims);
Shape to_shape(const Dims& dims);
// All extents must be constant.
Dims to_dims(const Shape& shape);

// NumPy broadcasting of one pair of extents / of two shapes; throws ShapeError when they cannot
// fit.
Dim broadcast(const Dim& a, const Dim& b);
Shape broadcast(const Shape& a, const Shape& b);
Dims broadcast(const Dims& a, const Dims& b);

// Row-major strides in elements.
Dims strides_of(const Dims& dims);
// axis in [-rank, rank) to [0, rank); throws ShapeError otherwise.
int64_t normalize_axis(int64_t axis, size_t rank);

}  // namespace ortrain
