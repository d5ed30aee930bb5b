// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <map>
#include <string>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

// A label per axis. Those of an ellipsis are numbers, counted from its end: they broadcast.
using Labels = std::vector<int>;

constexpr int kEllipsis = -1;       // while a term is parsed
constexpr int kFirstNumber = 1000;  // above every letter

bool is_from_ellipsis(int label) { return label >= kFirstNumber; }

bool has(const Labels& labels, int label) {
  return std::find(labels.begin(), labels.end(), label) != labels.end();
}

struct Operand {
  ValueId value;
  Labels labels;
};

struct Equation {
  std::vector<Labels> terms;
  Labels result;
  bool has_result = false;
};

Labels parse_term(const std::string& term, const std::string& equation) {
  Labels labels;
  for (size_t i = 0; i < term.size(); ++i) {
    if (std::isalpha(static_cast<unsigned char>(term[i])) != 0) {
      labels.push_back(static_cast<unsigned char>(term[i]));
    } else if (term.compare(i, 3, "...") == 0 && !has(labels, kEllipsis)) {
      labels.push_back(kEllipsis);
      i += 2;
    } else {
      throw InvalidModelError(str("equation '", equation, "' is no sum over labelled axes"));
    }
  }
  return labels;
}

Equation parse_equation(const std::string& given) {
  std::string text;
  std::copy_if(given.begin(), given.end(), std::back_inserter(text),
               [](unsigned char c) { return std::isspace(c) == 0; });
  Equation equation;
  const size_t arrow = text.find("->");
  if (arrow != std::string::npos) {
    equation.has_result = true;
    equation.result = parse_term(text.substr(arrow + 2), given);
    text.resize(arrow);
  }
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    equation.terms.push_back(parse_term(text.substr(begin, end - begin), given));
    begin = end + 1;
  }
  return equation;
}

// The axes that an ellipsis stands for, `count` of them.
Labels numbered(const Labels& labels, size_t count) {
  Labels result;
  for (int label : labels) {
    if (label != kEllipsis) {
      result.push_back(label);
      continue;
    }
    for (size_t i = count; i > 0; --i) result.push_back(kFirstNumber + static_cast<int>(i) - 1);
  }
  return result;
}

class Einsum {
 public:
  explicit Einsum(ExpandContext& e) : e_(e), text_(e.attrs().string_("equation")) {}

  ValueId build() {
    const Equation equation = parse_equation(text_);
    if (equation.terms.size() != e_.num_inputs()) {
      throw InvalidModelError(str("equation '", text_, "' has ", equation.terms.size(),
                                  " terms for ", e_.num_inputs(), " inputs"));
    }
    std::vector<Operand> operands;
    for (size_t i = 0; i < equation.terms.size(); ++i) {
      operands.push_back({e_.input(i), labels_of(i, equation.terms[i])});
    }
    result_ = result_of(equation, operands);
    for (Operand& operand : operands) take_diagonals(operand);
    // What is needed behind each operand, every label once: there may be many operands.
    std::vector<Labels> later(operands.size(), result_);
    for (size_t i = operands.size() - 1; i > 0; --i) {
      later[i - 1] = later[i];
      for (int label : operands[i].labels) {
        if (!has(later[i - 1], label)) later[i - 1].push_back(label);
      }
    }
    Operand product = operands[0];
    for (size_t i = 1; i < operands.size(); ++i) {
      product = multiply(std::move(product), std::move(operands[i]), later[i]);
    }
    sum_all_but(product, result_);
    return arranged(product, result_);
  }

 private:
  Labels labels_of(size_t input, const Labels& term) {
    const size_t rank = e_.shape(e_.input(input)).size();
    const bool open = has(term, kEllipsis);
    const size_t named = term.size() - (open ? 1 : 0);
    if (open ? named > rank : named != rank) {
      throw ShapeError(str("term ", input, " of equation '", text_, "' has ", named,
                           " labels, the input is ", shape_str(e_.shape(e_.input(input)))));
    }
    widest_ = std::max(widest_, rank - named);
    return numbered(term, rank - named);
  }

  Labels result_of(const Equation& equation, const std::vector<Operand>& operands) const {
    if (equation.has_result) {
      Labels result = numbered(equation.result, widest_);
      for (size_t i = 0; i < result.size(); ++i) {
        const bool known = std::any_of(operands.begin(), operands.end(),
                                       [&](const Operand& o) { return has(o.labels, result[i]); });
        const bool again = std::count(result.begin(), result.end(), result[i]) > 1;
        if (!known || again) {
          throw InvalidModelError(str("equation '", text_, "' has a result that is not possible"));
        }
      }
      return result;
    }
    // Axes of the ellipsis first, then the letters that stand once, in their order.
    std::map<int, int> counts;
    for (const Operand& operand : operands) {
      for (int label : operand.labels) ++counts[label];
    }
    Labels result = numbered({kEllipsis}, widest_);
    for (const auto& [label, count] : counts) {
      if (!is_from_ellipsis(label) && count == 1) result.push_back(label);
    }
    return result;
  }

  // An axis that is named twice is reduced to its diagonal: times the identity, summed.
  void take_diagonals(Operand& operand) {
    for (size_t i = 0; i < operand.labels.size(); ++i) {
      const auto later = std::find(operand.labels.begin() + static_cast<int64_t>(i) + 1,
                                   operand.labels.end(), operand.labels[i]);
      if (later == operand.labels.end()) continue;
      const size_t second = static_cast<size_t>(later - operand.labels.begin());
      const ValueId value = operand.value;
      const int64_t extent = e_.known_extent(value, i, "an input with a diagonal");
      if (e_.known_extent(value, second, "an input with a diagonal") != extent) {
        throw ShapeError(
            str("equation '", text_, "' takes a diagonal of ", shape_str(e_.shape(value))));
      }
      const ValueId position = e_.positions(value, static_cast<int64_t>(i));
      const auto along = [&](size_t axis) {
        std::vector<int64_t> others;
        for (size_t k = 0; k < operand.labels.size(); ++k) {
          if (k != axis) others.push_back(static_cast<int64_t>(k));
        }
        return e_.unsqueeze(position, others);
      };
      const ValueId on_diagonal = e_.op("Equal", {along(i), along(second)});
      const ValueId kept = e_.where(on_diagonal, value, e_.scalar(e_.dtype(value), 0.0));
      operand.value = e_.reduce_sum(kept, {static_cast<int64_t>(second)}, false);
      operand.labels.erase(later);
      --i;  // it may stand a third time
    }
  }

  void sum_all_but(Operand& operand, const Labels& kept) {
    std::vector<int64_t> axes;
    Labels left;
    for (size_t i = 0; i < operand.labels.size(); ++i) {
      if (has(kept, operand.labels[i])) {
        left.push_back(operand.labels[i]);
      } else {
        axes.push_back(static_cast<int64_t>(i));
      }
    }
    if (axes.empty()) return;
    operand.value = e_.reduce_sum(operand.value, axes, false);
    operand.labels = left;
  }

  // The operand with its axes in the order of `labels`; extents of 1 for those it does not have.
  ValueId arranged(const Operand& operand, const Labels& labels) {
    std::vector<int64_t> perm, missing;
    for (size_t i = 0; i < labels.size(); ++i) {
      const auto found = std::find(operand.labels.begin(), operand.labels.end(), labels[i]);
      if (found == operand.labels.end()) {
        missing.push_back(static_cast<int64_t>(i));
      } else {
        perm.push_back(found - operand.labels.begin());
      }
    }
    ValueId value = operand.value;
    if (!std::is_sorted(perm.begin(), perm.end())) value = e_.transpose(value, perm);
    return missing.empty() ? value : e_.unsqueeze(value, missing);
  }

  // Sums over what the two share and nothing later needs.
  Operand multiply(Operand a, Operand b, const Labels& later) {
    Labels wanted_a = later, wanted_b = later;
    wanted_a.insert(wanted_a.end(), b.labels.begin(), b.labels.end());
    wanted_b.insert(wanted_b.end(), a.labels.begin(), a.labels.end());
    sum_all_but(a, wanted_a);
    sum_all_but(b, wanted_b);
    Labels batch, rows, columns, summed;
    for (int label : a.labels) {
      if (!has(b.labels, label)) {
        (is_from_ellipsis(label) ? batch : rows).push_back(label);
      } else {
        // An axis of an ellipsis may be 1 in one of the two: it broadcasts, and is summed later.
        (has(later, label) || is_from_ellipsis(label) ? batch : summed).push_back(label);
      }
    }
    for (int label : b.labels) {
      if (!has(a.labels, label)) (is_from_ellipsis(label) ? batch : columns).push_back(label);
    }
    if (summed.empty()) return outer_product(a, b, batch, rows, columns);
    Operand made{matrix_product(a, b, batch, rows, columns, summed), batch};
    made.labels.insert(made.labels.end(), rows.begin(), rows.end());
    made.labels.insert(made.labels.end(), columns.begin(), columns.end());
    return made;
  }

  Operand outer_product(const Operand& a, const Operand& b, const Labels& batch, const Labels& rows,
                        const Labels& columns) {
    Labels labels = batch;
    labels.insert(labels.end(), rows.begin(), rows.end());
    labels.insert(labels.end(), columns.begin(), columns.end());
    return {e_.mul(arranged(a, labels), arranged(b, labels)), labels};
  }

  // [batch, rows, summed] times [batch, summed, columns], each group one axis.
  ValueId matrix_product(const Operand& a, const Operand& b, const Labels& batch,
                         const Labels& rows, const Labels& columns, const Labels& summed) {
    const auto joined = [](Labels first, const Labels& second) {
      first.insert(first.end(), second.begin(), second.end());
      return first;
    };
    const ValueId left = arranged(a, joined(joined(batch, rows), summed));
    const ValueId right = arranged(b, joined(joined(batch, summed), columns));
    const size_t lead = batch.size();
    const ValueId row_extents = extents(left, lead, rows.size());
    const ValueId column_extents = extents(right, lead + summed.size(), columns.size());
    const ValueId product = e_.op("MatMul", {merged(left, lead, {rows.size(), summed.size()}),
                                             merged(right, lead, {summed.size(), columns.size()})});
    if (rows.size() == 1 && columns.size() == 1) return product;
    std::vector<ValueId> parts;
    for (size_t axis = 0; axis < lead; ++axis) {
      parts.push_back(e_.extent_of(product, static_cast<int64_t>(axis)));
    }
    if (row_extents != kNoValue) parts.push_back(row_extents);
    if (column_extents != kNoValue) parts.push_back(column_extents);
    if (parts.empty()) return e_.squeeze(product, {0, 1});
    return e_.reshape(product, e_.concat(parts, 0));
  }

  // The extents of `count` axes from `first` on; kNoValue for none.
  ValueId extents(ValueId value, size_t first, size_t count) {
    std::vector<ValueId> parts;
    for (size_t i = 0; i < count; ++i) {
      parts.push_back(e_.extent_of(value, static_cast<int64_t>(first + i)));
    }
    return parts.empty() ? kNoValue : e_.concat(parts, 0);
  }

  // The axes behind the first `lead` as one axis per group of the given sizes.
  ValueId merged(ValueId value, size_t lead, const std::vector<size_t>& groups) {
    if (std::all_of(groups.begin(), groups.end(), [](size_t n) { return n == 1; })) return value;
    std::vector<ValueId> parts;
    size_t axis = 0;
    for (; axis < lead; ++axis) parts.push_back(e_.extent_of(value, static_cast<int64_t>(axis)));
    for (size_t size : groups) {
      ValueId extent = e_.int64s({1});
      for (size_t i = 0; i < size; ++i, ++axis) {
        const ValueId next = e_.extent_of(value, static_cast<int64_t>(axis));
        extent = i == 0 ? next : e_.mul(extent, next);
      }
      parts.push_back(extent);
    }
    return e_.reshape(value, e_.concat(parts, 0));
  }

  ExpandContext& e_;
  const std::string& text_;
  Labels result_;
  size_t widest_ = 0;  // axes that the longest ellipsis stands for
};

}  // namespace

void register_einsum(OpRegistry& registry);
void register_einsum(OpRegistry& registry) {
  registry.add({.name = "Einsum",
                .since = 12,
                .summary = "Products of all inputs, summed over the axes that the result of the "
                           "equation does not name (Einstein's convention).",
                .inputs = {{"Inputs", "T", Arity::variadic}},
                .outputs = {{"Output", "T"}},
                .attrs = {{"equation", AttributeKind::string_, true}},
                .types = {{"T", kFloatTypes}},
                .expand = [](ExpandContext& e) { return std::vector{Einsum(e).build()}; }});
}

}  // namespace ortrain::ops
