// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_scatter(CaseRegistry& cases);
void register_scatter(CaseRegistry& cases) {
  using In = CaseInput;
  const auto gather = [&cases](const char* name, Dims data, In indices, int64_t axis,
                               std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = "GatherElements",
               .name = name,
               .inputs = {In::normal(std::move(data)), std::move(indices)},
               .attributes = {{"axis", axis}},
               .refusal = std::move(refusal)});
  };
  gather("rows", {5, 7}, In::integers(DType::i64, {5, 9}, -7, 7), 1);
  gather("columns", {5, 7}, In::integers(DType::i32, {8, 7}, -5, 5), 0);
  gather("smaller", {5, 7, 3}, In::integers(DType::i64, {2, 4, 3}, 0, 7), 1);
  gather("many_beside", {6, 150}, In::integers(DType::i64, {4, 131}, -6, 6), 0);
  gather("many_beside_rank_3", {2, 5, 70}, In::integers(DType::i64, {2, 7, 67}, 0, 5), 1);
  gather("rank_1", {17}, In::integers(DType::i64, {9}, 0, 17), -1);
  gather("no_indices", {5, 7}, In::integers(DType::i64, {5, 0}, 0, 1), 1);
  gather("too_wide", {5, 7}, In::integers(DType::i64, {6, 7}, 0, 5), 1, "do not fit data");
  gather("too_large", {3}, In::int64s({0, 3}), 0, "indices[1] = 3 is out of range");
  cases.add({.op = "GatherElements",
             .name = "types",
             .inputs = {In::integers(DType::undefined, {3, 4}, 0, 2),
                        In::integers(DType::i64, {3, 9}, 0, 4)},
             .attributes = {{"axis", int64_t{1}}},
             .types = kAllTypes,
             .check_gradient = false});

  for (const std::string reduction : {"none", "add", "mul", "max", "min"}) {
    const auto scatter = [&](const char* name, Dims data, In indices, int64_t axis,
                             std::optional<std::string> refusal = std::nullopt) {
      const Dims dims = indices.dims;
      cases.add({.op = "ScatterElements",
                 .name = reduction + "_" + name,
                 .inputs = {In::normal(std::move(data)), std::move(indices), In::normal(dims)},
                 .attributes = {{"axis", axis}, {"reduction", reduction}},
                 .refusal = std::move(refusal)});
    };
    scatter("distinct", {7}, In::int64s({6, -7, 3}), 0);
    scatter("rows", {3, 5}, In::literal(DType::i64, {2, 3}, {0, -1, 2, 1, 3, 4}), 1);
    scatter("beside", {3, 2, 66}, In::integers(DType::i64, {2, 1, 65}, 0, 2), 1);
    scatter("no_indices", {3, 5}, In::integers(DType::i64, {3, 0}, 0, 1), 1);
    scatter("too_large", {7}, In::int64s({7}), 0, "out of range");
    cases.add({.op = "ScatterND",
               .name = reduction + "_rows",
               .inputs = {In::normal({4, 5, 2}), In::literal(DType::i64, {3, 1}, {3, -4, 1}),
                          In::normal({3, 5, 2})},
               .attributes = {{"reduction", reduction}}});
    cases.add({.op = "ScatterND",
               .name = reduction + "_elements",
               .inputs = {In::normal({4, 5}), In::literal(DType::i64, {2, 2}, {3, -1, 0, 2}),
                          In::normal({2})},
               .attributes = {{"reduction", reduction}}});
    cases.add({.op = "ScatterElements",
               .name = reduction + "_types",
               .inputs = {In::integers(DType::undefined, {2, 5}, 0, 3),
                          In::literal(DType::i32, {2, 2}, {0, 4, 2, 1}),
                          In::integers(DType::undefined, {2, 2}, 0, 3)},
               .attributes = {{"axis", int64_t{1}}, {"reduction", reduction}},
               .types = kAllTypes,
               .check_gradient = false});
    if (reduction == "none") continue;
    scatter("repeated", {5, 3}, In::integers(DType::i64, {9, 3}, -5, 5), 0);
    scatter("all_into_one", {3}, In::int64s({1, 1, 1, 1}), 0);
    cases.add({.op = "ScatterND",
               .name = reduction + "_repeated",
               .inputs = {In::normal({3, 4}), In::integers(DType::i64, {7, 1}, -3, 3),
                          In::normal({7, 4})},
               .attributes = {{"reduction", reduction}}});
  }
  for (const std::vector<double>& updates : {std::vector<double>{2, 0, 3}, {0, 0, 3}, {1, 2, 3}}) {
    cases.add({.op = "ScatterElements",
               .name = updates[0] == 2 ? "mul_one_zero" : updates[0] == 0 ? "mul_two_zeros"
                                                                         : "mul_zero_data",
               .inputs = {In::literal(DType::undefined, {2}, {0, 1.5}), In::int64s({1, 1, 0}),
                          In::literal(DType::undefined, {3}, updates)},
               .attributes = {{"reduction", std::string("mul")}}});
  }
  cases.add({.op = "ScatterElements",
             .name = "many_repeated",
             .inputs = {In::normal({3000}), In::integers(DType::i64, {900}, 0, 50),
                        In::normal({900})},
             .attributes = {{"reduction", std::string("add")}},
             .types = kFullFloatTypes,  // the CPU rounds each sum of 16 bits
             .check_gradient = false});
  cases.add({.op = "ScatterElements",
             .name = "last_of_many",
             .inputs = {In::normal({2, 300}), In::integers(DType::i32, {2, 400}, -300, 300),
                        In::normal({2, 400})},
             .attributes = {{"axis", int64_t{1}}},
             .check_gradient = false});
  cases.add({.op = "ScatterElements",
             .name = "unknown_reduction",
             .inputs = {In::normal({3}), In::int64s({1}), In::normal({1})},
             .attributes = {{"reduction", std::string("mean")}},
             .refusal = "none of none, add"});
  cases.add({.op = "ScatterElements",
             .name = "updates_misfit",
             .inputs = {In::normal({3}), In::int64s({1}), In::normal({2})},
             .refusal = "input 'updates' has the shape [2]"});
  cases.add({.op = "ScatterND",
             .name = "updates_misfit",
             .inputs = {In::normal({3, 2}), In::literal(DType::i64, {1, 1}, {1}), In::normal({1})},
             .refusal = "input 'updates' has the shape [1]"});
  cases.add({.op = "ScatterND",
             .name = "too_small",
             .inputs = {In::normal({3, 2}), In::literal(DType::i64, {1, 2}, {1, -3}),
                        In::normal({1})},
             .refusal = "indices[1] = -3 is out of range for an extent of 2 (axis 1)"});

  const auto gather_nd = [&cases](const char* name, Dims data, In indices, int64_t batch_dims,
                                  std::optional<std::string> refusal = std::nullopt) {
    cases.add({.op = "GatherND",
               .name = name,
               .inputs = {In::normal(std::move(data)), std::move(indices)},
               .attributes = {{"batch_dims", batch_dims}},
               .refusal = std::move(refusal)});
  };
  gather_nd("elements", {4, 5}, In::integers(DType::i64, {7, 2}, -4, 4), 0);
  gather_nd("rows", {4, 5}, In::integers(DType::i64, {3, 3, 1}, 0, 4), 0);
  gather_nd("batch", {2, 3, 4}, In::integers(DType::i64, {2, 1}, 0, 3), 1);
  gather_nd("batch_of_many", {2, 3, 4, 5}, In::integers(DType::i64, {2, 7, 2}, -3, 3), 1);
  gather_nd("two_batches", {2, 3, 4}, In::integers(DType::i64, {2, 3, 5, 1}, 0, 4), 2);
  gather_nd("no_tuples", {4, 5}, In::integers(DType::i64, {0, 2}, 0, 1), 0);
  gather_nd("empty_tuples", {4, 5}, In::integers(DType::i64, {3, 0}, 0, 1), 0);
  gather_nd("too_long", {4, 5}, In::integers(DType::i64, {3, 3}, 0, 1), 0, "do not fit data");
  gather_nd("batch_misfit", {2, 3}, In::integers(DType::i64, {3, 1}, 0, 1), 1, "must be equal");
  gather_nd("batch_out_of_range", {2, 3}, In::integers(DType::i64, {2, 1}, 0, 1), 2,
            "batch_dims 2 is out of range");
  gather_nd("too_large", {4, 5}, In::literal(DType::i64, {1, 2}, {3, 5}), 0, "out of range");
  cases.add({.op = "GatherND",
             .name = "types",
             .inputs = {In::integers(DType::undefined, {3, 4}, 0, 2),
                        In::integers(DType::i64, {5, 2}, 0, 3)},
             .types = kAllTypes,
             .check_gradient = false});
  cases.add({.op = "ortrain::GatherNDGrad",
             .name = "rows",
             .inputs = {In::normal({7, 5}), In::integers(DType::i64, {7, 1}, -4, 4),
                        In::int64s({4, 5})}});
  cases.add({.op = "ortrain::GatherNDGrad",
             .name = "batch",
             .inputs = {In::normal({2, 7, 5}), In::integers(DType::i64, {2, 7, 2}, -3, 3),
                        In::int64s({2, 3, 4, 5})},
             .attributes = {{"batch_dims", int64_t{1}}}});
  cases.add({.op = "ortrain::GatherNDGrad",
             .name = "misfit",
             .inputs = {In::normal({7, 4}), In::integers(DType::i64, {7, 1}, -4, 4),
                        In::int64s({4, 5})},
             .refusal = "the gradient has the shape"});
}

}  // namespace ortrain::testing
