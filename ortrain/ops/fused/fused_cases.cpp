// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

Attributes program(std::string body) { return {{"program", "expr 1\n" + std::move(body)}}; }

CaseInput f32(Dims dims) {
  CaseInput input = CaseInput::normal(std::move(dims));
  input.dtype = DType::f32;
  return input;
}

CaseInput of(DType type, Dims dims) {
  CaseInput input = CaseInput::normal(std::move(dims));
  input.dtype = type;
  return input;
}

constexpr const char* kNorm =
    "%0 = input float32\n"
    "%1 = input float32\n"
    "%2 = constant float32 1e-06\n"
    "%3 = mul float32 %0 %0\n"
    "%4 = row_mean float32 %3\n"
    "%5 = add float32 %4 %2\n"
    "%6 = rsqrt float32 %5\n"
    "%7 = mul float32 %0 %6\n"
    "%8 = mul float32 %7 %1\n"
    "output %8 float32\n";

void add_norms(CaseRegistry& cases) {
  for (const int64_t columns : {0, 1, 7, 8, 9, 17, 64, 1031, 5000}) {
    cases.add({.op = "ortrain::Fused",
               .name = "norm_" + std::to_string(columns),
               .inputs = {f32({3, 11, columns}), f32({columns})},
               .attributes = program(kNorm),
               .check_gradient = false});
  }
}

void add_broadcasts(CaseRegistry& cases) {
  const std::string body =
      "%0 = input float32\n%1 = input float32\n%2 = input float32\n"
      "%3 = mul float32 %0 %1\n%4 = add float32 %3 %2\n%5 = tanh float32 %4\n"
      "output %5 float32\noutput %3 float32\n";
  const std::vector<std::vector<Dims>> shapes = {{{2, 3, 5, 7}, {2, 1, 1, 7}, {}},
                                                 {{2, 3, 5, 7}, {3, 1, 1}, {5, 1}},
                                                 {{2, 3, 5, 1500}, {2, 1, 5, 1500}, {1500}},
                                                 {{5, 1}, {1, 9}, {4, 1, 1}},
                                                 {{1}, {}, {1, 1}},
                                                 {{3000, 3}, {3}, {3000, 1}},
                                                 {{0, 4}, {4}, {1}},
                                                 {{2, 0}, {2, 1}, {1}},
                                                 {{70, 1, 33}, {1, 6, 33}, {70, 6, 1}}};
  for (size_t i = 0; i < shapes.size(); ++i) {
    cases.add({.op = "ortrain::Fused",
               .name = "broadcast_" + std::to_string(i),
               .inputs = {f32(shapes[i][0]), f32(shapes[i][1]), f32(shapes[i][2])},
               .attributes = program(body),
               .outputs = 2,
               .check_gradient = false});
  }
}

void add_rows(CaseRegistry& cases) {
  for (const Dims& dims : {Dims{5, 7}, Dims{2, 3, 600}, Dims{1500, 3}, Dims{4, 1}, Dims{9}}) {
    Dims rows = dims;
    rows.back() = 1;
    const std::string name = dims_str(dims);
    // Values per row in, out, and of all kinds of reductions.
    cases.add({.op = "ortrain::Fused",
               .name = "rows_" + name,
               .inputs = {f32(dims), f32(rows), of(DType::bf16, rows)},
               .attributes = program("%0 = input float32\n%1 = input float32 per_row\n"
                                     "%2 = input bfloat16 per_row\n"
                                     "%3 = sub float32 %0 %1\n%4 = row_sum float32 %3\n"
                                     "%5 = row_max float32 %3\n%6 = row_min float32 %0\n"
                                     "%7 = mul float32 %4 %2\n%8 = add float32 %7 %5\n"
                                     "%9 = div float32 %3 %8\n%10 = row_mean float32 %9\n"
                                     "%11 = exp float32 %1\n"
                                     "output %8 float32\noutput %9 bfloat16\noutput %10 float32\n"
                                     "output %6 float32\noutput %11 float32\n"),
               .outputs = 5,
               .check_gradient = false,
               .tolerance = 1e-4});
    // Reductions of what does not vary along the row.
    cases.add({.op = "ortrain::Fused",
               .name = "reduced_constants_" + name,
               .inputs = {f32(dims), f32({})},
               .attributes = program("%0 = input float32\n%1 = input float32\n"
                                     "%2 = row_sum float32 %1\n%3 = row_max float32 %0\n"
                                     "%4 = add float32 %2 %3\n%5 = constant float32 2\n"
                                     "output %4 float32\noutput %1 float32\noutput %5 float32\n"
                                     "output %0 float16\noutput %0 float32\n"),
               .outputs = 5,
               .check_gradient = false});
  }
}

void add_types(CaseRegistry& cases) {
  const CaseInput seed = CaseInput::literal(DType::i64, {}, {77});
  for (const DType type : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
    const std::string t(name_of(type));
    const std::string r(type == DType::f64 ? "float64" : "float32");
    cases.add(
        {.op = "ortrain::Fused",
         .name = "dropout_" + t,
         .inputs = {of(type, {3, 700}), of(type, {700}), seed},
         .attributes = program("%0 = input " + t + "\n%1 = input " + t +
                               "\n%2 = input int64\n%3 = add " + r + " %0 %1\n%4 = dropout " + r +
                               " %3 %2 ratio 0.25 stream 9\n%5 = dropout_mask bool %2 "
                               "ratio 0.25 stream 9\noutput %4 " +
                               t + "\noutput %5 bool\n"),
         .outputs = 2,
         .check_gradient = false});
  }
  cases.add({.op = "ortrain::Fused",
             .name = "mask_from_ids",
             .inputs = {CaseInput::integers(DType::i64, {4, 1, 33}, 0, 3), f32({4, 6, 33})},
             .attributes = program("%0 = input int64\n%1 = input float32\n%2 = constant int64 1\n"
                                   "%3 = eq bool %0 %2\n%4 = constant float32 -inf\n"
                                   "%5 = select float32 %3 %4 %1\n%6 = cast int32 %3\n"
                                   "output %5 float32\noutput %6 int32\n"),
             .outputs = 2,
             .check_gradient = false});
  cases.add({.op = "ortrain::Fused",
             .name = "narrow_integers",
             .inputs = {CaseInput::integers(DType::u8, {4, 9}, 0, 255)},
             .attributes = program("%0 = input uint8\n%1 = cast float32 %0\n%2 = constant float32 "
                                   "0.00392156862745098\n%3 = mul float32 %1 %2\noutput %3 "
                                   "float32\n"),
             .check_gradient = false});
}

void add_refusals(CaseRegistry& cases) {
  const auto refuse = [&](const char* name, std::vector<CaseInput> inputs, std::string body,
                          std::string why) {
    cases.add({.op = "ortrain::Fused",
               .name = name,
               .inputs = std::move(inputs),
               .attributes = program(std::move(body)),
               .check_gradient = false,
               .refusal = std::move(why)});
  };
  refuse("too_few_inputs", {f32({3})},
         "%0 = input float32\n%1 = input float32\noutput %0 float32\n", "2 inputs");
  refuse("wrong_type", {of(DType::f64, {3})}, "%0 = input float32\noutput %0 float32\n",
         "takes float32");
  refuse("per_row_of_many", {f32({3, 4})}, "%0 = input float32 per_row\noutput %0 float32\n",
         "last extent must be 1");
  refuse("garbage", {f32({3})}, "%0 = launch float32\noutput %0 float32\n", "unknown operation");
  refuse("seeds", {f32({3, 2}), CaseInput::int64s({1, 2})},
         "%0 = input float32\n%1 = input int64\n%2 = dropout float32 %0 %1 ratio 0.5 stream 0\n"
         "output %2 float32\n",
         "seed");
}

}  // namespace

void register_fused(CaseRegistry& cases) {
  add_norms(cases);
  add_broadcasts(cases);
  add_rows(cases);
  add_types(cases);
  add_refusals(cases);
}

}  // namespace ortrain::testing
