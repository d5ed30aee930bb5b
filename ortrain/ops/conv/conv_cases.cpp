// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <utility>

#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

using Ints = std::vector<int64_t>;

// A convolution with the attributes that all three of its operators take.
struct ConvCase {
  const char* name;
  Dims x, w, y;
  Attributes attributes = {};
};

std::vector<ConvCase> conv_cases() {
  return {
      {"line", {2, 3, 17}, {4, 3, 3}, {2, 4, 15}},
      {"line_strided",
       {1, 2, 17},
       {3, 2, 4},
       {1, 3, 8},
       {{"strides", Ints{2}}, {"pads", Ints{1, 0}}}},
      {"padded", {2, 3, 7, 8}, {4, 3, 3, 3}, {2, 4, 7, 8}, {{"pads", Ints{1, 1, 1, 1}}}},
      {"strided",
       {2, 3, 9, 8},
       {4, 3, 3, 3},
       {2, 4, 5, 4},
       {{"pads", Ints{1, 1, 1, 1}}, {"strides", Ints{2, 2}}}},
      {"uneven_pads", {1, 2, 7, 9}, {3, 2, 3, 2}, {1, 3, 8, 10}, {{"pads", Ints{2, 0, 1, 2}}}},
      {"dilated",
       {1, 2, 9, 9},
       {3, 2, 3, 3},
       {1, 3, 9, 3},
       {{"pads", Ints{2, 0, 2, 0}}, {"dilations", Ints{2, 3}}}},
      {"dilated_strided",
       {1, 2, 11, 12},
       {2, 2, 3, 2},
       {1, 2, 4, 6},
       {{"dilations", Ints{2, 3}}, {"strides", Ints{2, 2}}, {"pads", Ints{0, 1, 0, 1}}}},
      {"grouped", {2, 4, 7, 7}, {6, 2, 3, 3}, {2, 6, 5, 5}, {{"group", int64_t{2}}}},
      {"depthwise",
       {2, 5, 8, 7},
       {5, 1, 3, 3},
       {2, 5, 8, 7},
       {{"group", int64_t{5}}, {"pads", Ints{1, 1, 1, 1}}}},
      {"depthwise_doubled",
       {1, 3, 7, 7},
       {6, 1, 3, 3},
       {1, 6, 3, 3},
       {{"group", int64_t{3}}, {"strides", Ints{2, 2}}}},
      {"depthwise_dilated",
       {2, 3, 11, 12},
       {9, 1, 3, 2},
       {2, 9, 4, 6},
       {{"group", int64_t{3}},
        {"dilations", Ints{2, 3}},
        {"strides", Ints{2, 2}},
        {"pads", Ints{0, 1, 0, 1}}}},
      {"depthwise_line",
       {2, 9, 17},
       {9, 1, 4},
       {2, 9, 17},
       {{"group", int64_t{9}}, {"pads", Ints{3, 0}}}},
      {"pointwise", {2, 7, 3, 5}, {9, 7, 1, 1}, {2, 9, 3, 5}},
      {"pointwise_strided", {1, 3, 5, 8}, {2, 3, 1, 1}, {1, 2, 3, 4}, {{"strides", Ints{2, 2}}}},
      {"same_upper",
       {1, 2, 8, 7},
       {3, 2, 3, 4},
       {1, 3, 4, 4},
       {{"auto_pad", std::string("SAME_UPPER")}, {"strides", Ints{2, 2}}}},
      {"same_lower",
       {1, 2, 8, 7},
       {3, 2, 3, 4},
       {1, 3, 4, 4},
       {{"auto_pad", std::string("SAME_LOWER")}, {"strides", Ints{2, 2}}}},
      {"valid", {1, 2, 8, 7}, {3, 2, 3, 4}, {1, 3, 6, 4}, {{"auto_pad", std::string("VALID")}}},
      {"volume",
       {1, 2, 4, 5, 6},
       {3, 2, 2, 3, 3},
       {1, 3, 3, 3, 6},
       {{"pads", Ints{0, 0, 1, 0, 0, 1}}}},
      {"volume_grouped",
       {2, 4, 3, 4, 5},
       {4, 2, 3, 1, 2},
       {2, 4, 2, 4, 2},
       {{"pads", Ints{1, 0, 0, 1, 0, 0}}, {"strides", Ints{2, 1, 2}}, {"group", int64_t{2}}}},
      {"whole_kernel", {3, 2, 5, 4}, {7, 2, 5, 4}, {3, 7, 1, 1}},
      {"far_padding", {1, 1, 1, 1}, {1, 1, 3, 3}, {1, 1, 5, 5}, {{"pads", Ints{3, 3, 3, 3}}}},
      {"empty_batch", {0, 2, 5, 5}, {3, 2, 3, 3}, {0, 3, 3, 3}},
  };
}

void add_conv(CaseRegistry& cases) {
  for (const ConvCase& c : conv_cases()) {
    cases.add(
        {.op = "Conv",
         .name = c.name,
         .inputs = {CaseInput::normal(c.x), CaseInput::normal(c.w), CaseInput::normal({c.w[0]})},
         .attributes = c.attributes});
    cases.add({.op = "ortrain::ConvInputGrad",
               .name = c.name,
               .inputs = {CaseInput::normal(c.y), CaseInput::normal(c.w), CaseInput::int64s(c.x)},
               .attributes = c.attributes});
    cases.add({.op = "ortrain::ConvWeightGrad",
               .name = c.name,
               .inputs = {CaseInput::normal(c.y), CaseInput::normal(c.x), CaseInput::int64s(c.w)},
               .attributes = c.attributes});
  }
  cases.add({.op = "Conv",
             .name = "no_bias",
             .inputs = {CaseInput::normal({2, 3, 8, 8}), CaseInput::normal({5, 3, 3, 3})}});
  // Several bands of columns.
  const Dims x{1, 16, 14, 140}, w{8, 16, 3, 3}, y{1, 8, 14, 140};
  const Attributes padded{{"pads", Ints{1, 1, 1, 1}}};
  cases.add({.op = "Conv",
             .name = "wide",
             .inputs = {CaseInput::normal(x), CaseInput::normal(w), CaseInput::normal({8})},
             .attributes = padded,
             .check_gradient = false});
  cases.add({.op = "ortrain::ConvInputGrad",
             .name = "wide",
             .inputs = {CaseInput::normal(y), CaseInput::normal(w), CaseInput::int64s(x)},
             .attributes = padded,
             .check_gradient = false});
  cases.add({.op = "ortrain::ConvWeightGrad",
             .name = "wide",
             .inputs = {CaseInput::normal(y), CaseInput::normal(x), CaseInput::int64s(w)},
             .attributes = padded,
             .types = {DType::f32, DType::f64},
             .check_gradient = false,
             .tolerance = 2e-4});  // sums of 2000 terms that cancel
  // Channels that fill matrix units.
  for (const ConvCase& c : std::vector<ConvCase>{
           {"many_channels",
            {2, 32, 9, 10},
            {64, 32, 3, 3},
            {2, 64, 9, 10},
            {{"pads", Ints{1, 1, 1, 1}}}},
           {"many_channels_grouped",
            {2, 32, 9, 10},
            {64, 16, 3, 3},
            {2, 64, 5, 5},
            {{"pads", Ints{1, 1, 1, 1}}, {"strides", Ints{2, 2}}, {"group", int64_t{2}}}}}) {
    cases.add(
        {.op = "Conv",
         .name = c.name,
         .inputs = {CaseInput::normal(c.x), CaseInput::normal(c.w), CaseInput::normal({c.w[0]})},
         .attributes = c.attributes,
         .check_gradient = false,
         .tolerance = 1e-4});
    cases.add({.op = "ortrain::ConvInputGrad",
               .name = c.name,
               .inputs = {CaseInput::normal(c.y), CaseInput::normal(c.w), CaseInput::int64s(c.x)},
               .attributes = c.attributes,
               .check_gradient = false,
               .tolerance = 1e-4});
    cases.add({.op = "ortrain::ConvWeightGrad",
               .name = c.name,
               .inputs = {CaseInput::normal(c.y), CaseInput::normal(c.x), CaseInput::int64s(c.w)},
               .attributes = c.attributes,
               .check_gradient = false,
               .tolerance = 1e-4});
  }
  cases.add({.op = "Conv",
             .name = "cropped",
             .inputs = {CaseInput::normal({1, 2, 9, 8}), CaseInput::normal({3, 2, 3, 3})},
             .attributes = {{"pads", Ints{-1, 1, 1, -2}}}});
}

void add_conv_transpose(CaseRegistry& cases) {
  struct Case {
    const char* name;
    Dims x, w;
    int64_t channels;
    Attributes attributes = {};
  };
  const std::vector<Case> all = {
      {"plain", {2, 3, 5, 4}, {3, 4, 3, 3}, 4},
      {"line", {2, 3, 7}, {3, 2, 4}, 2, {{"strides", Ints{2}}, {"pads", Ints{1, 1}}}},
      {"output_padding",
       {1, 2, 4, 5},
       {2, 3, 3, 3},
       3,
       {{"strides", Ints{2, 3}}, {"pads", Ints{1, 0, 1, 1}}, {"output_padding", Ints{1, 2}}}},
      {"dilated_output_padding",
       {1, 2, 4, 3},
       {2, 3, 2, 2},
       3,
       {{"dilations", Ints{3, 2}}, {"output_padding", Ints{2, 1}}}},
      {"grouped", {2, 4, 3, 4}, {4, 3, 2, 3}, 6, {{"group", int64_t{2}}, {"strides", Ints{2, 1}}}},
      {"depthwise",
       {1, 3, 4, 4},
       {3, 1, 2, 2},
       3,
       {{"group", int64_t{3}}, {"strides", Ints{2, 2}}}},
      {"output_shape",
       {1, 2, 3, 3},
       {2, 2, 3, 3},
       2,
       {{"output_shape", Ints{10, 8}}, {"strides", Ints{3, 2}}}},
      {"same_upper",
       {1, 2, 3, 4},
       {2, 2, 3, 4},
       2,
       {{"auto_pad", std::string("SAME_UPPER")}, {"strides", Ints{2, 2}}}},
      {"same_lower",
       {1, 2, 3, 4},
       {2, 2, 3, 4},
       2,
       {{"auto_pad", std::string("SAME_LOWER")}, {"strides", Ints{2, 1}}}},
      {"volume", {1, 2, 2, 3, 4}, {2, 2, 2, 1, 3}, 2, {{"strides", Ints{2, 1, 2}}}},
      {"empty_batch", {0, 2, 3, 3}, {2, 3, 2, 2}, 3},
  };
  for (const Case& c : all) {
    cases.add({.op = "ConvTranspose",
               .name = c.name,
               .inputs = {CaseInput::normal(c.x), CaseInput::normal(c.w),
                          CaseInput::normal({c.channels})},
               .attributes = c.attributes});
  }
  cases.add({.op = "ConvTranspose",
             .name = "no_bias",
             .inputs = {CaseInput::normal({2, 3, 4, 4}), CaseInput::normal({3, 2, 3, 3})}});
}

void add_refusals(CaseRegistry& cases) {
  const auto refuse = [&](const char* op, const char* name, Dims x, Dims w, Attributes attributes,
                          const char* text) {
    cases.add({.op = op,
               .name = name,
               .inputs = {CaseInput::normal(std::move(x)), CaseInput::normal(std::move(w))},
               .attributes = std::move(attributes),
               .refusal = text});
  };
  refuse("Conv", "wrong_channels", {1, 3, 5, 5}, {4, 2, 3, 3}, {}, "has 3 channels");
  refuse("Conv", "kernel_too_large", {1, 2, 2, 5}, {4, 2, 3, 3}, {}, "the kernel spans 3 elements");
  refuse("Conv", "rank_mismatch", {1, 2, 5}, {4, 2, 3, 3}, {}, "must have the rank");
  refuse("Conv", "groups_do_not_divide", {1, 4, 5, 5}, {5, 2, 3, 3}, {{"group", int64_t{2}}},
         "do not divide into 2 groups");
  refuse("Conv", "kernel_shape_differs", {1, 2, 5, 5}, {4, 2, 3, 3}, {{"kernel_shape", Ints{3, 2}}},
         "kernel_shape is [3, 2]");
  refuse("Conv", "zero_stride", {1, 2, 5, 5}, {4, 2, 3, 3}, {{"strides", Ints{1, 0}}},
         "must be positive");
  refuse("Conv", "four_spatial_axes", {1, 1, 2, 2, 2, 2}, {1, 1, 1, 1, 1, 1}, {}, "at most 3");
  refuse("Conv", "unknown_auto_pad", {1, 2, 5, 5}, {4, 2, 3, 3},
         {{"auto_pad", std::string("HALF")}}, "auto_pad is 'HALF'");
  refuse("Conv", "pads_beyond_int32", {1, 2, 5}, {3, 2, 2},
         {{"pads", Ints{std::numeric_limits<int64_t>::min(), -1}}},
         "pads has -9223372036854775808");
  refuse("ConvTranspose", "wrong_channels", {1, 3, 5, 5}, {2, 4, 3, 3}, {},
         "does not fit the weight");
  refuse("ConvTranspose", "output_padding_too_large", {1, 2, 5, 5}, {2, 4, 3, 3},
         {{"output_padding", Ints{1, 0}}}, "output_padding 1");
  cases.add({.op = "ortrain::ConvInputGrad",
             .name = "wrong_shape",
             .inputs = {CaseInput::normal({1, 4, 4, 4}), CaseInput::normal({4, 2, 3, 3}),
                        CaseInput::int64s({1, 2, 5, 5})},
             .refusal = "the convolution gives [1, 4, 3, 3]"});
}

}  // namespace

void register_conv(CaseRegistry& cases) {
  add_conv(cases);
  add_conv_transpose(cases);
  add_refusals(cases);
}

}  // namespace ortrain::testing
