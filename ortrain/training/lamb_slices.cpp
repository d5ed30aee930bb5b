// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/lamb_slices.h"

namespace ortrain {
namespace {

// Without the attributes that an operator does not have.
Attributes without(Attributes attributes, std::initializer_list<const char*> names) {
  for (const char* name : names) attributes.erase(name);
  return attributes;
}

template <class Get>
void append(std::vector<ValueId>& inputs, const std::vector<LambSlice>& slices, Get get) {
  for (const LambSlice& slice : slices) inputs.push_back(slice.*get);
}

}  // namespace

void add_lamb_steps(GraphBuilder& builder, std::span<LambSliceGroup> groups, ValueId factor,
                    ValueId skip, const std::string& sum_norms) {
  std::vector<ValueId> norms;
  std::vector<int64_t> numbers;
  for (LambSliceGroup& group : groups) {
    std::vector<ValueId> inputs{group.rate, group.step, factor, skip};
    append(inputs, group.slices, &LambSlice::parameter);
    append(inputs, group.slices, &LambSlice::gradient);
    append(inputs, group.slices, &LambSlice::exp_avg);
    append(inputs, group.slices, &LambSlice::exp_avg_sq);
    const size_t count = group.slices.size();
    const std::vector<ValueId> made =
        builder.node(kOrtrainDomain, "LambMoments", inputs,
                     without(group.attributes, {"ratio_min", "ratio_max"}),
                     std::vector<bool>(1 + 2 * count, true));
    norms.push_back(made[0]);
    for (size_t i = 0; i < count; ++i) {
      group.slices[i].exp_avg = made[1 + i];
      group.slices[i].exp_avg_sq = made[1 + count + i];
      numbers.push_back(group.slices[i].number);
    }
  }
  const auto total = static_cast<int64_t>(numbers.size());
  const ValueId own = builder.op("Concat", norms, {{"axis", int64_t{0}}});
  const ValueId whole = builder.node(
      kOrtrainDomain, "External", {builder.int64s({total, 2}), builder.int64s(numbers), own},
      {{"callable", sum_norms},
       {"types", std::vector<int64_t>{static_cast<int64_t>(DType::f64)}},
       {"site", int64_t{0}}},
      {true})[0];
  int64_t first = 0;
  for (LambSliceGroup& group : groups) {
    const int64_t end = first + static_cast<int64_t>(group.slices.size());
    const ValueId of_group = builder.op(
        "Slice", {whole, builder.int64s({first}), builder.int64s({end}), builder.int64s({0})});
    first = end;
    std::vector<ValueId> inputs{group.rate, group.step, of_group, skip};
    append(inputs, group.slices, &LambSlice::parameter);
    append(inputs, group.slices, &LambSlice::exp_avg);
    append(inputs, group.slices, &LambSlice::exp_avg_sq);
    const std::vector<ValueId> made =
        builder.node(kOrtrainDomain, "LambUpdate", inputs, group.attributes,
                     std::vector<bool>(group.slices.size(), true));
    for (size_t i = 0; i < made.size(); ++i) group.slices[i].parameter = made[i];
  }
}

}  // namespace ortrain
