// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <utility>

#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

CaseInput filled(CaseInput like, Dims dims) {
  like.dims = std::move(dims);
  return like;
}

// One operand, over odd sizes.
void add_unary(CaseRegistry& cases, const std::string& op, const CaseInput& fill,
               bool check_gradient = true, const Attributes& attributes = {},
               const std::string& suffix = "") {
  for (const Dims& dims :
       {Dims{}, Dims{0}, Dims{1}, Dims{7}, Dims{8}, Dims{3, 17}, Dims{5, 1031}}) {
    std::string name = "shape";
    for (int64_t dim : dims) name += "_" + std::to_string(dim);
    cases.add({.op = op,
               .name = name + suffix,
               .inputs = {filled(fill, dims)},
               .attributes = attributes,
               .check_gradient = check_gradient && num_elements(dims) < 100});
  }
}

// Two operands, over the ways to broadcast.
void add_binary(CaseRegistry& cases, const std::string& op, const CaseInput& a, const CaseInput& b,
                bool check_gradient = true, const Attributes& attributes = {},
                const std::string& suffix = "") {
  const std::vector<std::pair<std::string, std::pair<Dims, Dims>>> shapes = {
      {"same", {{3, 17}, {3, 17}}},
      {"scalars", {{}, {}}},
      {"scalar_right", {{9}, {}}},
      {"scalar_left", {{}, {9}}},
      {"row", {{2, 3, 8}, {8}}},
      {"column", {{2, 3, 7}, {2, 3, 1}}},
      {"middle", {{2, 3, 7}, {2, 1, 7}}},
      {"outer", {{5, 1}, {1, 9}}},
      {"mask_over_heads", {{2, 1, 1, 9}, {2, 3, 4, 9}}},
      {"empty", {{0, 3}, {1, 3}}},
      {"empty_rows", {{3, 0}, {3, 1}}},
      {"long_rows", {{3, 1500}, {1500}}},
      {"long_columns", {{1500, 3}, {1500, 1}}},
      {"long", {{4111}, {4111}}},
  };
  for (const auto& [name, dims] : shapes) {
    const bool small = num_elements(dims.first) < 100;
    cases.add({.op = op,
               .name = name + suffix,
               .inputs = {filled(a, dims.first), filled(b, dims.second)},
               .attributes = attributes,
               .check_gradient = check_gradient && small});
  }
}

void add_integers(CaseRegistry& cases, const std::string& op, DType type, int64_t low, int64_t high,
                  const Attributes& attributes = {}) {
  const CaseInput a = CaseInput::integers(type, {2, 3, 8}, low, high);
  const CaseInput b = CaseInput::integers(type, {8}, 1, high);
  cases.add({.op = op,
             .name = str("row_", name_of(type)),
             .inputs = {a, b},
             .attributes = attributes,
             .types = {type},
             .check_gradient = false});
}

void add_unary_cases(CaseRegistry& cases) {
  const CaseInput normal = CaseInput::normal({});
  const CaseInput positive = CaseInput::positive({});
  const CaseInput inside = CaseInput::uniform({}, -0.9, 0.9);
  const CaseInput wide = CaseInput::uniform({}, -20.0, 20.0);
  for (const char* op :
       {"Neg",      "Abs",      "Exp",         "Erf",       "Sin",       "Cos", "Atan", "Sinh",
        "Cosh",     "Tanh",     "Sigmoid",     "Relu",      "LeakyRelu", "Elu", "Selu", "Celu",
        "Softplus", "Softsign", "HardSigmoid", "HardSwish", "Mish",      "Gelu"}) {
    add_unary(cases, op, normal);
  }
  for (const char* op : {"Log", "Sqrt", "Reciprocal"}) add_unary(cases, op, positive);
  for (const char* op : {"Asin", "Acos", "Tan"}) add_unary(cases, op, inside);
  for (const char* op : {"Floor", "Ceil", "Round", "Sign", "ortrain::Trunc"}) {
    add_unary(cases, op, CaseInput::uniform({}, -5.0, 5.0), false);
  }
  for (const char* op : {"Identity", "ortrain::StopGradient"}) {
    add_unary(cases, op, normal, op == std::string("Identity"));
  }
  for (const char* op : {"Tanh", "Sigmoid", "Softplus", "Erf", "Gelu", "Mish", "Elu"}) {
    add_unary(cases, op, wide, true, {}, "_wide");
  }
  add_unary(cases, "Gelu", normal, true, {{"approximate", std::string("tanh")}}, "_tanh");
  add_unary(cases, "LeakyRelu", normal, true, {{"alpha", 0.2}}, "_alpha");
  add_unary(cases, "Elu", normal, true, {{"alpha", 1.7}}, "_alpha");
  add_unary(cases, "Celu", normal, true, {{"alpha", 1.7}}, "_alpha");
  add_unary(cases, "HardSigmoid", normal, true, {{"alpha", 0.3}, {"beta", 0.4}}, "_line");
  cases.add({.op = "Round",
             .name = "halves",
             .inputs = {CaseInput::literal(DType::undefined, {8},
                                           {0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5, 0.25})},
             .check_gradient = false});
  const CaseInput special =
      CaseInput::literal(DType::undefined, {6}, {kNan, kInf, -kInf, 0.0, -0.0, 1.0});
  for (const char* op : {"Relu", "Exp", "Log", "Sqrt", "Tanh", "Sigmoid", "Sign", "Floor", "Erf", "ortrain::Trunc",
                         "Softplus", "Gelu", "Abs", "Reciprocal"}) {
    cases.add({.op = op, .name = "special", .inputs = {special}, .check_gradient = false});
  }
  for (const char* op : {"IsNaN", "IsInf"}) {
    cases.add({.op = op, .name = "special", .inputs = {special}, .check_gradient = false});
  }
  cases.add({.op = "IsInf",
             .name = "negative",
             .inputs = {special},
             .attributes = {{"detect_positive", int64_t{0}}},
             .check_gradient = false});
  for (const DType type : {DType::i8, DType::i16, DType::i32, DType::i64}) {
    for (const char* op : {"Neg", "Abs", "Sign", "Relu"}) {
      cases.add({.op = op,
                 .name = str("odd_", name_of(type)),
                 .inputs = {CaseInput::integers(type, {3, 17}, -100, 100)},
                 .types = {type},
                 .check_gradient = false});
    }
  }
  for (const char* approximate : {"none", "tanh"}) {
    cases.add({.op = "ortrain::GeluGrad",
               .name = approximate,
               .inputs = {CaseInput::normal({3, 17}), CaseInput::uniform({3, 17}, -8, 8)},
               .attributes = {{"approximate", std::string(approximate)}},
               .check_gradient = false});
  }
  cases.add({.op = "Gelu",
             .name = "bad_approximate",
             .inputs = {normal},
             .attributes = {{"approximate", std::string("sigmoid")}},
             .refusal = "approximate"});
}

void add_binary_cases(CaseRegistry& cases) {
  const CaseInput normal = CaseInput::normal({});
  const CaseInput positive = CaseInput::positive({});
  for (const char* op : {"Add", "Sub", "Mul", "Min", "Max", "Sum", "Mean"}) {
    add_binary(cases, op, normal, normal);
  }
  add_binary(cases, "Div", normal, positive);
  add_binary(cases, "Pow", positive, normal);
  add_binary(cases, "ortrain::TruncDiv", CaseInput::uniform({}, -9, 9), positive, false);
  add_binary(cases, "ortrain::FloorDiv", CaseInput::uniform({}, -9, 9), positive, false);
  add_binary(cases, "Mod", CaseInput::uniform({}, -9, 9), positive, true, {{"fmod", int64_t{1}}});
  for (const char* op : {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"}) {
    add_binary(cases, op, normal, normal, false);
    cases.add({.op = op,
               .name = "ties_and_nan",
               .inputs = {CaseInput::literal(DType::undefined, {5}, {1, 2, kNan, kInf, -0.0}),
                          CaseInput::literal(DType::undefined, {5}, {1, 1, kNan, kInf, 0.0})},
               .check_gradient = false});
  }
  for (const char* op : {"Min", "Max"}) {
    cases.add({.op = op,
               .name = "nan",
               .inputs = {CaseInput::literal(DType::undefined, {4}, {1, kNan, 2, kNan}),
                          CaseInput::literal(DType::undefined, {4}, {kNan, 1, 3, kNan})},
               .check_gradient = false});
    cases.add(
        {.op = op,
         .name = "three",
         .inputs = {CaseInput::normal({3, 5}), CaseInput::normal({5}), CaseInput::normal({3, 1})}});
    cases.add({.op = op, .name = "one", .inputs = {CaseInput::normal({3, 5})}});
  }
  for (const char* op : {"Sum", "Mean"}) {
    cases.add(
        {.op = op,
         .name = "three",
         .inputs = {CaseInput::normal({3, 5}), CaseInput::normal({5}), CaseInput::normal({3, 1})}});
    cases.add({.op = op, .name = "one", .inputs = {CaseInput::normal({3, 5})}});
  }
  for (const DType type : {DType::i8, DType::i16, DType::i32, DType::i64, DType::u8, DType::u16,
                           DType::u32, DType::u64}) {
    const int64_t low = is_signed_integer(type) ? -100 : 0;
    for (const char* op :
         {"Add", "Sub", "Mul", "Div", "Min", "Max", "ortrain::FloorDiv", "Mod", "Less",
          "GreaterOrEqual", "Equal", "BitwiseAnd", "BitwiseOr", "BitwiseXor"}) {
      add_integers(cases, op, type, low, 100);
    }
    add_integers(cases, "Mod", type, low, 100, {{"fmod", int64_t{1}}});
    cases.add({.op = "BitwiseNot",
               .name = str("odd_", name_of(type)),
               .inputs = {CaseInput::integers(type, {3, 17}, low, 100)},
               .types = {type},
               .check_gradient = false});
    cases.add(
        {.op = "Pow",
         .name = str("integers_", name_of(type)),
         .inputs = {CaseInput::integers(type, {3, 7}, 0, 5), CaseInput::integers(type, {7}, 0, 4)},
         .types = {type},
         .check_gradient = false});
  }
  for (const double exponent : {2.0, 3.0, 4.0, 0.5, -0.5, -1.0, 1.0, 0.0, 2.5}) {
    cases.add({.op = "Pow",
               .name = str("constant_", exponent),
               .inputs = {CaseInput::positive({3, 17}),
                          CaseInput::literal(DType::undefined, {}, {exponent})}});
  }
  cases.add({.op = "Pow",
             .name = "integer_exponent",
             .inputs = {CaseInput::normal({3, 7}), CaseInput::integers(DType::i64, {7}, 0, 4)}});
  cases.add({.op = "Pow",
             .name = "zero_base",
             .inputs = {CaseInput::literal(DType::undefined, {3}, {0, 0, 2}),
                        CaseInput::literal(DType::undefined, {3}, {2, 3, 0})}});
  cases.add({.op = "Div",
             .name = "by_zero_int64",
             .inputs = {CaseInput::int64s({1, 2, 3}), CaseInput::int64s({1, 0, 3})},
             .types = {DType::i64},
             .check_gradient = false,
             .refusal = "division by zero"});
  cases.add({.op = "Add",
             .name = "shapes_that_do_not_fit",
             .inputs = {CaseInput::normal({3, 4}), CaseInput::normal({5})},
             .refusal = "broadcast"});
  cases.add({.op = "Mod",
             .name = "float_without_fmod",
             .inputs = {CaseInput::normal({3}), CaseInput::positive({3})},
             .refusal = "fmod"});
}

void add_logic_and_selection_cases(CaseRegistry& cases) {
  const CaseInput bools = CaseInput::integers(DType::boolean, {3, 17}, 0, 2);
  const CaseInput row = CaseInput::integers(DType::boolean, {17}, 0, 2);
  for (const char* op : {"And", "Or", "Xor", "Equal"}) {
    cases.add({.op = op,
               .name = "row_bool",
               .inputs = {bools, row},
               .types = {DType::boolean},
               .check_gradient = false});
  }
  cases.add({.op = "Not",
             .name = "odd",
             .inputs = {bools},
             .types = {DType::boolean},
             .check_gradient = false});
  const auto where = [&](std::string name, Dims condition, Dims x, Dims y) {
    cases.add({.op = "Where",
               .name = std::move(name),
               .inputs = {CaseInput::integers(DType::boolean, std::move(condition), 0, 2),
                          CaseInput::normal(std::move(x)), CaseInput::normal(std::move(y))}});
  };
  where("same", {3, 17}, {3, 17}, {3, 17});
  where("scalar_y", {3, 17}, {3, 17}, {});
  where("scalar_x", {3, 17}, {}, {3, 17});
  where("scalars", {3, 17}, {}, {});
  where("mask_over_heads", {2, 1, 1, 9}, {2, 3, 4, 9}, {});
  where("three_ways", {3, 1, 1}, {1, 5, 1}, {1, 1, 7});
  where("empty", {0}, {1}, {0});
  for (const DType type : {DType::i32, DType::i64, DType::u8, DType::boolean}) {
    cases.add({.op = "Where",
               .name = str("odd_", name_of(type)),
               .inputs = {bools, CaseInput::integers(type, {3, 17}, 0, 2),
                          CaseInput::integers(type, {17}, 0, 2)},
               .types = {type},
               .check_gradient = false});
  }
  const CaseInput x = CaseInput::uniform({3, 17}, -3, 3);
  const auto bound = [](double value) { return CaseInput::literal(DType::undefined, {}, {value}); };
  cases.add({.op = "Clip", .name = "both", .inputs = {x, bound(-1.01), bound(1.03)}});
  cases.add({.op = "Clip", .name = "low", .inputs = {x, bound(-1.01)}});
  cases.add({.op = "Clip", .name = "high", .inputs = {x, CaseInput::none(), bound(1.03)}});
  cases.add({.op = "Clip", .name = "none", .inputs = {x}});
  cases.add({.op = "Clip", .name = "crossed", .inputs = {x, bound(1.01), bound(-1.03)}});
  cases.add({.op = "Clip",
             .name = "vector_bound",
             .inputs = {x, CaseInput::normal({17})},
             .refusal = "scalars"});
}

void add_cast_cases(CaseRegistry& cases) {
  constexpr DType kTypes[] = {DType::f32, DType::f64, DType::f16,    DType::bf16, DType::i8,
                              DType::i16, DType::i32, DType::i64,    DType::u8,   DType::u16,
                              DType::u32, DType::u64, DType::boolean};
  for (const DType from : kTypes) {
    for (const DType to : kTypes) {
      const bool is_unsigned = !is_float(from) && !is_signed_integer(from);
      CaseInput x = CaseInput::integers(from, {3, 17}, is_unsigned ? 0 : -100,
                                        from == DType::boolean ? 2 : 100);
      if (is_float(from)) {
        x = CaseInput::uniform({3, 17}, is_float(to) || is_signed_integer(to) ? -90 : 0, 90);
        x.dtype = from;
      }
      cases.add({.op = "Cast",
                 .name = str(name_of(from), "_to_", name_of(to)),
                 .inputs = {x},
                 .attributes = {{"to", static_cast<int64_t>(to)}},
                 .types = {from},
                 .check_gradient = from == DType::f64 && to == DType::f64});
    }
  }
  cases.add({.op = "Cast",
             .name = "to_string",
             .inputs = {CaseInput::normal({3})},
             .attributes = {{"to", int64_t{8}}},
             .refusal = "element type 8"});
}

void add_dropout_cases(CaseRegistry& cases) {
  const CaseInput seed = CaseInput::literal(DType::i64, {}, {1234567890123});
  for (const double ratio : {0.0, 0.1, 0.5, 1.0}) {
    for (const char* op : {"ortrain::Dropout", "ortrain::DropoutMask"}) {
      for (const Dims& dims : {Dims{}, Dims{0}, Dims{3, 17}, Dims{7, 513}}) {
        cases.add(
            {.op = op,
             .name = str("ratio_", ratio, "_rank_", dims.size(), "_", num_elements(dims)),
             .inputs = {CaseInput::normal(dims), seed},
             .attributes = {{"ratio", ratio}, {"stream", int64_t{5}}},
             .check_gradient = op == std::string("ortrain::Dropout") && num_elements(dims) < 100});
      }
    }
  }
  cases.add({.op = "ortrain::Dropout",
             .name = "ratio_above_one",
             .inputs = {CaseInput::normal({3}), seed},
             .attributes = {{"ratio", 1.5}},
             .refusal = "ratio"});
  const auto mode = [](double on) { return CaseInput::literal(DType::boolean, {}, {on}); };
  const CaseInput ratio = CaseInput::literal(DType::f32, {}, {0.25});
  cases.add({.op = "Dropout",
             .name = "evaluation",
             .inputs = {CaseInput::normal({3, 17}), ratio, mode(0)},
             .outputs = 2});
  cases.add({.op = "Dropout", .name = "bare", .inputs = {CaseInput::normal({3, 17})}});
  cases.add({.op = "Dropout",
             .name = "training",
             .inputs = {CaseInput::normal({3, 17}), ratio, mode(1)},
             .attributes = {{"seed", int64_t{42}}},
             .outputs = 2});
  cases.add({.op = "Dropout",
             .name = "training_without_seed",
             .inputs = {CaseInput::normal({3, 17}), ratio, mode(1)},
             .refusal = "seed"});
}

}  // namespace

void register_elementwise(CaseRegistry& cases) {
  add_unary_cases(cases);
  add_binary_cases(cases);
  add_logic_and_selection_cases(cases);
  add_cast_cases(cases);
  add_dropout_cases(cases);
}

}  // namespace ortrain::testing
