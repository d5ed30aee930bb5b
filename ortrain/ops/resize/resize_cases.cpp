// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

using Ints = std::vector<int64_t>;

CaseInput scales(std::vector<double> values) {
  const int64_t count = static_cast<int64_t>(values.size());
  return CaseInput::literal(DType::f32, {count}, std::move(values));
}

struct ResizeCase {
  std::string name;
  Dims x, y;
  CaseInput roi = CaseInput::none();
  CaseInput factors = CaseInput::none();
  CaseInput sizes = CaseInput::none();
  Attributes attributes = {};
};

std::vector<ResizeCase> resize_cases() {
  const auto text = [](const char* value) { return std::string(value); };
  std::vector<ResizeCase> all;
  // Every coordinate transformation with every interpolation, growing one axis, shrinking another.
  for (const char* where : {"half_pixel", "half_pixel_symmetric", "pytorch_half_pixel",
                            "align_corners", "asymmetric"}) {
    for (const char* mode : {"nearest", "linear", "cubic"}) {
      all.push_back(
          {.name = std::string(mode) + "_" + where,
           .x = {1, 2, 5, 7},
           .y = {1, 2, 8, 3},
           .sizes = CaseInput::int64s({1, 2, 8, 3}),
           .attributes = {{"mode", text(mode)}, {"coordinate_transformation_mode", text(where)}}});
      all.push_back(
          {.name = std::string(mode) + "_" + where + "_scales",
           .x = {1, 1, 7, 5},
           .y = {1, 1, 9, 3},
           .factors = scales({1, 1, 1.3125, 0.65625}),
           .attributes = {{"mode", text(mode)}, {"coordinate_transformation_mode", text(where)}}});
    }
  }
  for (const char* nearest : {"round_prefer_floor", "round_prefer_ceil", "floor", "ceil"}) {
    all.push_back({.name = std::string("nearest_mode_") + nearest,
                   .x = {1, 1, 4, 6},
                   .y = {1, 1, 8, 3},
                   .factors = scales({1, 1, 2, 0.5}),
                   .attributes = {{"mode", text("nearest")}, {"nearest_mode", text(nearest)}}});
  }
  for (const char* mode : {"linear", "cubic"}) {
    all.push_back({.name = std::string(mode) + "_antialias",
                   .x = {1, 1, 9, 5},
                   .y = {1, 1, 4, 8},
                   .sizes = CaseInput::int64s({1, 1, 4, 8}),
                   .attributes = {{"mode", text(mode)}, {"antialias", int64_t{1}}}});
    all.push_back({.name = std::string(mode) + "_exclude_outside",
                   .x = {1, 1, 4, 5},
                   .y = {1, 1, 7, 3},
                   .sizes = CaseInput::int64s({1, 1, 7, 3}),
                   .attributes = {{"mode", text(mode)}, {"exclude_outside", int64_t{1}}}});
    all.push_back({.name = std::string(mode) + "_crop",
                   .x = {1, 1, 4, 5},
                   .y = {1, 1, 3, 6},
                   .roi = scales({0, 0, 0.375, -0.5, 1, 1, 0.625, 1.25}),
                   .sizes = CaseInput::int64s({1, 1, 3, 6}),
                   .attributes = {{"mode", text(mode)},
                                  {"coordinate_transformation_mode", text("tf_crop_and_resize")},
                                  {"extrapolation_value", 3.0}}});
    all.push_back({.name = std::string(mode) + "_line_axes",
                   .x = {2, 3, 8},
                   .y = {2, 3, 17},
                   .sizes = CaseInput::int64s({17}),
                   .attributes = {{"mode", text(mode)}, {"axes", Ints{-1}}}});
  }
  all.push_back({.name = "volume",
                 .x = {1, 2, 3, 4, 2},
                 .y = {1, 2, 5, 2, 4},
                 .sizes = CaseInput::int64s({5, 2, 4}),
                 .attributes = {{"mode", text("linear")}, {"axes", Ints{2, 3, 4}}}});
  all.push_back({.name = "not_larger",
                 .x = {1, 1, 4, 6},
                 .y = {1, 1, 6, 9},
                 .sizes = CaseInput::int64s({7, 9}),
                 .attributes = {{"mode", text("linear")},
                                {"axes", Ints{2, 3}},
                                {"keep_aspect_ratio_policy", text("not_larger")}}});
  all.push_back({.name = "not_smaller",
                 .x = {1, 1, 4, 6},
                 .y = {1, 1, 8, 12},
                 .sizes = CaseInput::int64s({8, 9}),
                 .attributes = {{"mode", text("linear")},
                                {"axes", Ints{2, 3}},
                                {"keep_aspect_ratio_policy", text("not_smaller")}}});
  all.push_back({.name = "identity",
                 .x = {2, 3, 4},
                 .y = {2, 3, 4},
                 .factors = scales({1, 1, 1}),
                 .attributes = {{"mode", text("linear")}}});
  all.push_back({.name = "one_element",
                 .x = {1, 1, 1, 7},
                 .y = {1, 1, 8, 1},
                 .sizes = CaseInput::int64s({1, 1, 8, 1}),
                 .attributes = {{"mode", text("cubic")}}});
  all.push_back({.name = "empty_batch",
                 .x = {0, 2, 3, 3},
                 .y = {0, 2, 6, 6},
                 .factors = scales({1, 1, 2, 2}),
                 .attributes = {{"mode", text("linear")}}});
  return all;
}

}  // namespace

void register_resize(CaseRegistry& cases) {
  for (const ResizeCase& c : resize_cases()) {
    // roi and scales are float32 whatever the type under test, so they are constants here.
    cases.add({.op = "Resize",
               .name = c.name,
               .inputs = {CaseInput::normal(c.x), c.roi, c.factors, c.sizes},
               .attributes = c.attributes});
    cases.add(
        {.op = "ortrain::ResizeGrad",
         .name = c.name,
         .inputs = {CaseInput::normal(c.y), CaseInput::int64s(c.x), c.roi, c.factors, c.sizes},
         .attributes = c.attributes});
  }
  cases.add({.op = "Resize",
             .name = "not_smaller_rounded",  // 6 * 7 / 4 = 10.5
             .inputs = {CaseInput::normal({1, 1, 4, 6}), CaseInput::none(), CaseInput::none(),
                        CaseInput::int64s({7, 9})},
             .attributes = {{"mode", std::string("linear")},
                            {"axes", Ints{2, 3}},
                            {"keep_aspect_ratio_policy", std::string("not_smaller")}}});
  const auto refuse = [&](const char* name, CaseInput factors, CaseInput sizes,
                          Attributes attributes, const char* text) {
    cases.add({.op = "Resize",
               .name = name,
               .inputs = {CaseInput::normal({1, 1, 4, 5}), CaseInput::none(), std::move(factors),
                          std::move(sizes)},
               .attributes = std::move(attributes),
               .refusal = text});
  };
  refuse("both", scales({1, 1, 2, 2}), CaseInput::int64s({1, 1, 8, 10}), {}, "exactly one of");
  refuse("neither", CaseInput::none(), CaseInput::none(), {}, "exactly one of");
  refuse("wrong_count", scales({2, 2}), CaseInput::none(), {}, "scales has 2 entries");
  refuse("zero_scale", scales({1, 1, 0, 2}), CaseInput::none(), {}, "must be positive");
  refuse("unknown_mode", scales({1, 1, 2, 2}), CaseInput::none(), {{"mode", std::string("area")}},
         "mode is 'area'");
  refuse("unknown_coordinates", scales({1, 1, 2, 2}), CaseInput::none(),
         {{"coordinate_transformation_mode", std::string("corner")}},
         "coordinate_transformation_mode is 'corner'");
  refuse("crop_without_roi", scales({1, 1, 2, 2}), CaseInput::none(),
         {{"coordinate_transformation_mode", std::string("tf_crop_and_resize")}}, "needs a roi");
}

}  // namespace ortrain::testing
