// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/affine_values.h"

#include <gtest/gtest.h>

#include <random>

#include "ortrain/base/error.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

// Random programs of integers: what the analysis says is compared with what they compute.
class RandomProgram {
 public:
  explicit RandomProgram(uint64_t seed) : random_(seed), builder_(graph_) {
    const ValueId x = graph_.add_input({.role = InputRole::user}, "x", DType::i64,
                                       {Dim::symbol("n"), Dim::symbol("m")});
    const ValueId shape = builder_.shape_of(x);
    for (int64_t axis : {0, 1}) {
      extents_.push_back(builder_.op("Gather", {shape, builder_.scalar(DType::i64, double(axis))},
                                     {{"axis", int64_t{0}}}));
    }
    values_ = {x};
    add(builder_.op("Range", {scalar(0), extents_[0], scalar(1)}));
    add(builder_.op("Range", {scalar(-2), extents_[1], scalar(pick(3) + 1)}));
    for (int i = 0; i < 24; ++i) step();
    for (size_t i = 1; i < values_.size(); ++i) {
      graph_.add_output({.value = values_[i], .name = str("y", i), .role = OutputRole::user});
    }
    graph_.sort();
    verify(graph_);
  }

  const Graph& graph() const { return graph_; }
  const std::vector<ValueId>& values() const { return values_; }

 private:
  int64_t pick(int64_t below) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(below));
  }
  ValueId scalar(int64_t value) { return builder_.scalar(DType::i64, static_cast<double>(value)); }
  ValueId any(DType type) {
    for (int attempt = 0; attempt < 40; ++attempt) {
      const ValueId id = values_[static_cast<size_t>(pick(static_cast<int64_t>(values_.size())))];
      if (builder_.dtype(id) == type) return id;
    }
    return values_[0];
  }
  void add(ValueId id) { values_.push_back(id); }

  void step() {
    try {
      add(made());
    } catch (const Error&) {  // shapes that do not fit: another one
    }
  }

  ValueId made() {
    const ValueId a = any(DType::i64);
    const int64_t rank = builder_.rank(a);
    switch (pick(14)) {
      case 0:
        return builder_.add(a, any(DType::i64));
      case 1:
        return builder_.sub(a, any(DType::i64));
      case 2:
        return builder_.mul(a, scalar(pick(5) - 2));
      case 3:
        return builder_.add(a, scalar(pick(7) - 3));
      case 4:
        return rank < 4 ? builder_.unsqueeze(a, {pick(rank + 1)}) : a;
      case 5: {
        const ValueId extents = builder_.op(
            "Concat", {builder_.unsqueeze(extents_[0], {0}), builder_.unsqueeze(extents_[1], {0})},
            {{"axis", int64_t{0}}});
        return builder_.op("Expand", {a, extents});
      }
      case 6: {
        if (rank == 0) return a;
        const ValueId axis = builder_.int64s({pick(rank)});
        return builder_.op("Slice", {a, builder_.int64s({pick(3)}),
                                     builder_.int64s({pick(2) == 0 ? -1 : INT64_MAX}), axis,
                                     builder_.int64s({pick(2) + 1})});
      }
      case 7: {
        if (rank == 0) return a;
        const int64_t axis = pick(rank);
        const ValueId b = pick(2) == 0 ? a : any(DType::i64);
        return builder_.op("Concat", {a, b}, {{"axis", axis}});
      }
      case 8: {
        // The first element less one, in front: goes on counting backwards.
        if (rank == 0) return a;
        const int64_t axis = pick(rank);
        const ValueId first = builder_.op(
            "Slice", {a, builder_.int64s({0}), builder_.int64s({1}), builder_.int64s({axis})});
        return builder_.op("Concat", {builder_.sub(first, scalar(1)), a}, {{"axis", axis}});
      }
      case 9:
        return rank == 0 ? a : builder_.op("CumSum", {a, scalar(pick(rank))});
      case 10:
        return builder_.cast(any(DType::boolean), DType::i64);
      case 11: {
        const char* const names[] = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"};
        return builder_.op(names[pick(5)], {a, any(DType::i64)});
      }
      case 12:
        return builder_.op("And", {any(DType::boolean), any(DType::boolean)});
      default:
        return pick(2) == 0 ? builder_.op("Not", {any(DType::boolean)}) : gathered(a);
    }
  }

  ValueId gathered(ValueId data) {
    const int64_t rank = builder_.rank(data);
    if (rank == 0 || rank > 2) return data;
    std::vector<ValueId> parts;
    for (int64_t k = 0; k < rank; ++k) {
      const ValueId range =
          builder_.op("Range", {scalar(0), extents_[static_cast<size_t>(pick(2))], scalar(1)});
      parts.push_back(builder_.unsqueeze(range, {1}));
    }
    return builder_.op("GatherND", {data, builder_.op("Concat", parts, {{"axis", int64_t{-1}}})});
  }

  std::mt19937_64 random_;
  Graph graph_;
  GraphBuilder builder_;
  std::vector<ValueId> extents_, values_;
};

int64_t at(const AffineForm& form, const Dims& where, const std::map<std::string, int64_t>& sizes) {
  int64_t value = *form.constant.evaluate(sizes);
  for (size_t k = 0; k < where.size(); ++k) value += form.slopes[k] * where[k];
  return value;
}

Dims coordinates_of(int64_t index, const Dims& dims) {
  Dims where(dims.size());
  for (size_t k = dims.size(); k-- > 0;) {
    where[k] = index % dims[k];
    index /= dims[k];
  }
  return where;
}

TEST(AffineValues, ARandomProgramComputesWhatIsSaid) {
  int forms = 0, predicates = 0;
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    const RandomProgram program(seed);
    const Graph& graph = program.graph();
    const AffineValues values(graph);
    auto session = std::make_shared<Session>(graph, cpu_kernels());
    for (const auto& [n, m] : {std::pair<int64_t, int64_t>{1, 1}, {4, 3}, {5, 7}}) {
      const std::map<std::string, int64_t> sizes{{"n", n}, {"m", m}};
      std::vector<int64_t> x(static_cast<size_t>(n * m));
      for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<int64_t>(i * 7 % 5) - 2;
      std::vector<RunOutput> outputs;
      try {
        RunContext context(session, session->plan({Dims{n, m}}));
        const std::vector<const void*> addresses{x.data()};
        outputs = context.forward(addresses);
      } catch (const Error&) {  // sizes that do not fit, an index out of range
        continue;
      }
      for (size_t k = 0; k < outputs.size(); ++k) {
        const ValueId id = graph.outputs()[k].value;
        const Dims& dims = outputs[k].spec.dims;
        const int64_t count = num_elements(dims);
        if (const AffineForm* form = values.form(id)) {
          ++forms;
          const auto* data = static_cast<const int64_t*>(outputs[k].block->data());
          for (int64_t i = 0; i < count; ++i) {
            ASSERT_EQ(data[i], at(*form, coordinates_of(i, dims), sizes))
                << "seed " << seed << ", " << graph.value(id).name << ", element " << i;
          }
        }
        const Predicate* predicate = values.predicate(id);
        if (predicate == nullptr) continue;
        const auto* truth = static_cast<const bool*>(outputs[k].block->data());
        const bool known = std::ranges::all_of(predicate->conditions, [](const Condition& each) {
          return each.at_least_zero.has_value();
        });
        predicates += known;
        for (int64_t i = 0; i < count; ++i) {
          bool expected = !predicate->never;
          for (const Condition& each : predicate->conditions) {
            if (each.at_least_zero) {
              expected &= at(*each.at_least_zero, coordinates_of(i, dims), sizes) >= 0;
            }
          }
          // What is only known by its source may say no where the rest says yes.
          if (known || !expected) {
            ASSERT_EQ(truth[i], expected)
                << "seed " << seed << ", " << graph.value(id).name << ", element " << i;
          }
        }
      }
    }
  }
  EXPECT_GT(forms, 4000);
  EXPECT_GT(predicates, 120);
}

}  // namespace
}  // namespace ortrain
