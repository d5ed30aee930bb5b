// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <utility>

#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

using Ints = std::vector<int64_t>;

struct PoolCase {
  const char* name;
  Dims x, y;
  Attributes attributes;
};

std::vector<PoolCase> pool_cases() {
  return {
      {"line", {2, 3, 17}, {2, 3, 8}, {{"kernel_shape", Ints{3}}, {"strides", Ints{2}}}},
      {"long_line",
       {1, 2, 150},
       {1, 2, 75},
       {{"kernel_shape", Ints{3}}, {"strides", Ints{2}}, {"pads", Ints{1, 1}}}},
      {"padded",
       {2, 3, 7, 8},
       {2, 3, 4, 4},
       {{"kernel_shape", Ints{3, 3}}, {"strides", Ints{2, 2}}, {"pads", Ints{1, 1, 1, 1}}}},
      {"overlapping", {1, 2, 7, 9}, {1, 2, 5, 8}, {{"kernel_shape", Ints{3, 2}}}},
      {"uneven_pads",
       {1, 2, 7, 9},
       {1, 2, 8, 9},
       {{"kernel_shape", Ints{3, 2}}, {"pads", Ints{2, 0, 1, 1}}}},
      {"ceil",
       {1, 2, 8, 7},
       {1, 2, 4, 4},
       {{"kernel_shape", Ints{3, 2}}, {"strides", Ints{2, 2}}, {"ceil_mode", int64_t{1}}}},
      {"ceil_padded",
       {1, 2, 8, 9},
       {1, 2, 5, 4},
       {{"kernel_shape", Ints{3, 4}},
        {"strides", Ints{2, 3}},
        {"pads", Ints{1, 1, 1, 1}},
        {"ceil_mode", int64_t{1}}}},
      // The last window would start in the padding and is dropped.
      {"ceil_dropped",
       {1, 1, 5, 4},
       {1, 1, 3, 2},
       {{"kernel_shape", Ints{2, 2}},
        {"strides", Ints{2, 3}},
        {"pads", Ints{1, 1, 1, 1}},
        {"ceil_mode", int64_t{1}}}},
      {"dilated",
       {1, 2, 9, 8},
       {1, 2, 5, 6},
       {{"kernel_shape", Ints{3, 2}}, {"dilations", Ints{2, 4}}, {"pads", Ints{0, 1, 0, 1}}}},
      {"same_upper",
       {1, 2, 8, 7},
       {1, 2, 4, 3},
       {{"kernel_shape", Ints{3, 4}},
        {"strides", Ints{2, 3}},
        {"auto_pad", std::string("SAME_UPPER")}}},
      {"same_lower",
       {1, 2, 8, 7},
       {1, 2, 4, 3},
       {{"kernel_shape", Ints{3, 4}},
        {"strides", Ints{2, 3}},
        {"auto_pad", std::string("SAME_LOWER")}}},
      {"valid",
       {1, 2, 8, 7},
       {1, 2, 3, 3},
       {{"kernel_shape", Ints{3, 3}}, {"strides", Ints{2, 2}}, {"auto_pad", std::string("VALID")}}},
      {"volume",
       {1, 2, 4, 5, 6},
       {1, 2, 2, 3, 3},
       {{"kernel_shape", Ints{2, 3, 2}},
        {"strides", Ints{2, 2, 2}},
        {"pads", Ints{0, 1, 0, 0, 1, 0}}}},
      // Rows beyond 32 elements, of which a warp takes several of its widths.
      {"long_rows",
       {2, 2, 5, 69},
       {2, 2, 3, 35},
       {{"kernel_shape", Ints{3, 3}}, {"strides", Ints{2, 2}}, {"pads", Ints{1, 1, 1, 1}}}},
      {"long_rows_dilated",
       {1, 2, 9, 40},
       {1, 2, 5, 17},
       {{"kernel_shape", Ints{3, 3}}, {"strides", Ints{1, 2}}, {"dilations", Ints{2, 3}}}},
      {"long_rows_ceil",
       {1, 2, 6, 52},
       {1, 2, 3, 18},
       {{"kernel_shape", Ints{3, 2}}, {"strides", Ints{2, 3}}, {"ceil_mode", int64_t{1}}}},
      {"long_rows_volume",
       {1, 2, 3, 4, 35},
       {1, 2, 2, 2, 18},
       {{"kernel_shape", Ints{2, 2, 3}},
        {"strides", Ints{1, 2, 2}},
        {"pads", Ints{0, 0, 1, 0, 0, 1}}}},
      {"single", {1, 1, 1, 1}, {1, 1, 1, 1}, {{"kernel_shape", Ints{1, 1}}}},
      {"empty_batch", {0, 2, 5, 5}, {0, 2, 4, 4}, {{"kernel_shape", Ints{2, 2}}}},
  };
}

Attributes with_pads_counted(Attributes attributes) {
  attributes["count_include_pad"] = int64_t{1};
  return attributes;
}

void add_windowed(CaseRegistry& cases) {
  for (const PoolCase& c : pool_cases()) {
    cases.add({.op = "MaxPool",
               .name = c.name,
               .inputs = {CaseInput::normal(c.x)},
               .attributes = c.attributes,
               .outputs = 2});
    cases.add({.op = "ortrain::MaxPoolGrad",
               .name = c.name,
               .inputs = {CaseInput::normal(c.y), CaseInput::normal(c.x)},
               .attributes = c.attributes});
    for (const bool counted : {false, true}) {
      const Attributes attributes = counted ? with_pads_counted(c.attributes) : c.attributes;
      const std::string name = std::string(c.name) + (counted ? "_pads_counted" : "");
      cases.add({.op = "AveragePool",
                 .name = name,
                 .inputs = {CaseInput::normal(c.x)},
                 .attributes = attributes});
      cases.add({.op = "ortrain::AveragePoolGrad",
                 .name = name,
                 .inputs = {CaseInput::normal(c.y), CaseInput::int64s(c.x)},
                 .attributes = attributes});
    }
  }
  const double infinity = std::numeric_limits<double>::infinity();
  cases.add({.op = "MaxPool",
             .name = "infinite",
             .inputs = {CaseInput::literal(DType::undefined, {1, 1, 4},
                                           {-infinity, -infinity, infinity, infinity})},
             .attributes = {{"kernel_shape", Ints{2}}},
             .outputs = 2,
             .check_gradient = false});
  std::vector<double> plane(300, 1.0);
  plane[70] = plane[201] = std::nan("");
  cases.add({.op = "MaxPool",
             .name = "nan_in_large_window",
             .inputs = {CaseInput::literal(DType::undefined, {1, 1, 300}, plane)},
             .attributes = {{"kernel_shape", Ints{290}}, {"strides", Ints{4}}},
             .outputs = 2,
             .check_gradient = false});
  std::vector<double> rows(2 * 68);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<double>(i % 5 / 2);
  rows[3] = rows[67] = rows[70] = std::nan("");
  cases.add({.op = "MaxPool",
             .name = "nan_and_ties_in_long_rows",
             .inputs = {CaseInput::literal(DType::undefined, {1, 1, 2, 68}, rows)},
             .attributes = {{"kernel_shape", Ints{2, 3}}, {"strides", Ints{1, 2}}},
             .outputs = 2,
             .check_gradient = false});
  cases.add(
      {.op = "MaxPool",
       .name = "ties",  // the first of equal elements gets the gradient
       .inputs = {CaseInput::literal(DType::undefined, {1, 1, 2, 4}, {1, 1, 0, 2, 1, 1, 2, 2})},
       .attributes = {{"kernel_shape", Ints{2, 2}}, {"strides", Ints{2, 2}}},
       .outputs = 2,
       .check_gradient = false});
}

void add_global(CaseRegistry& cases) {
  struct Case {
    const char* name;
    Dims x, y;
  };
  for (const Case& c :
       {Case{"line", {2, 3, 17}, {2, 3, 1}}, Case{"plane", {2, 3, 7, 9}, {2, 3, 1, 1}},
        Case{"large_plane", {2, 1, 13, 17}, {2, 1, 1, 1}},
        Case{"volume", {1, 2, 3, 4, 5}, {1, 2, 1, 1, 1}},
        Case{"single", {1, 1, 1, 1}, {1, 1, 1, 1}},
        Case{"empty_batch", {0, 3, 2, 2}, {0, 3, 1, 1}}}) {
    for (const char* op : {"GlobalAveragePool", "GlobalMaxPool"}) {
      cases.add({.op = op, .name = c.name, .inputs = {CaseInput::normal(c.x)}});
    }
    cases.add({.op = "ortrain::GlobalAveragePoolGrad",
               .name = c.name,
               .inputs = {CaseInput::normal(c.y), CaseInput::int64s(c.x)}});
    cases.add({.op = "ortrain::GlobalMaxPoolGrad",
               .name = c.name,
               .inputs = {CaseInput::normal(c.y), CaseInput::normal(c.x)}});
  }
}

void add_adaptive(CaseRegistry& cases) {
  struct Case {
    const char* name;
    Dims x, y;
    Ints size;
  };
  for (const Case& c :
       {Case{"line", {2, 3, 17}, {2, 3, 7}, {7}}, Case{"plane", {2, 3, 7, 9}, {2, 3, 3, 4}, {3, 4}},
        Case{"larger_than_input", {1, 2, 3, 2}, {1, 2, 7, 5}, {7, 5}},
        Case{"one", {2, 3, 8, 9}, {2, 3, 1, 1}, {1, 1}},
        Case{"volume", {1, 2, 3, 4, 5}, {1, 2, 2, 3, 4}, {2, 3, 4}}}) {
    cases.add({.op = "ortrain::AdaptiveAveragePool",
               .name = c.name,
               .inputs = {CaseInput::normal(c.x)},
               .attributes = {{"output_size", c.size}}});
    cases.add({.op = "ortrain::AdaptiveAveragePoolGrad",
               .name = c.name,
               .inputs = {CaseInput::normal(c.y), CaseInput::int64s(c.x)},
               .attributes = {{"output_size", c.size}}});
  }
}

void add_refusals(CaseRegistry& cases) {
  const auto refuse = [&](const char* op, const char* name, Dims x, Attributes attributes,
                          const char* text) {
    cases.add({.op = op,
               .name = name,
               .inputs = {CaseInput::normal(std::move(x))},
               .attributes = std::move(attributes),
               .refusal = text});
  };
  refuse("MaxPool", "no_kernel_shape", {1, 2, 5, 5}, {}, "kernel_shape");
  refuse("MaxPool", "wrong_kernel_rank", {1, 2, 5, 5}, {{"kernel_shape", Ints{2}}},
         "does not fit 2 spatial axes");
  refuse("MaxPool", "padding_too_large", {1, 2, 5, 5},
         {{"kernel_shape", Ints{2, 2}}, {"pads", Ints{2, 0, 0, 0}}}, "must be in [0, 2)");
  refuse("AveragePool", "kernel_too_large", {1, 2, 5, 2}, {{"kernel_shape", Ints{2, 3}}},
         "the kernel spans 3 elements");
  refuse("AveragePool", "matrix", {2, 5}, {{"kernel_shape", Ints{}}}, "has rank 2");
  refuse("GlobalMaxPool", "empty_plane", {1, 2, 0, 3}, {}, "the maximum over no element");
  refuse("ortrain::AdaptiveAveragePool", "wrong_rank", {1, 2, 5, 3}, {{"output_size", Ints{2}}},
         "does not fit 2 spatial axes");
  cases.add({.op = "ortrain::AveragePoolGrad",
             .name = "wrong_shape",
             .inputs = {CaseInput::normal({1, 2, 5, 5}), CaseInput::int64s({1, 2, 5, 5})},
             .attributes = {{"kernel_shape", Ints{2, 2}}},
             .refusal = "the pooling gives [1, 2, 4, 4]"});
}

}  // namespace

void register_pool(CaseRegistry& cases) {
  add_windowed(cases);
  add_global(cases);
  add_adaptive(cases);
  add_refusals(cases);
}

}  // namespace ortrain::testing
