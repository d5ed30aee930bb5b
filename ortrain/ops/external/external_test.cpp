// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/onnx_io.h"
#include "ortrain/runtime/external_functions.h"
#include "ortrain/runtime/kernel_registry.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

constexpr const char* kKey = "test::product";

// (a, b) -> a b and the sum of a; counts what it keeps.
class Product : public ExternalFunction {
 public:
  struct Kept {
    explicit Kept(int* alive) : alive(alive) { ++*alive; }
    ~Kept() { --*alive; }
    int* alive;
    std::vector<double> a, b;
  };

  std::shared_ptr<void> forward(std::span<const ExternalTensor> operands,
                                std::span<const ExternalTensor> results,
                                std::span<const int64_t> tracked) const override {
    EXPECT_EQ(operands.size(), 2u);
    const auto* a = static_cast<const double*>(operands[0].data);
    const auto* b = static_cast<const double*>(operands[1].data);
    const auto n = static_cast<size_t>(operands[0].spec.numel());
    double sum = 0.0;
    for (size_t i = 0; i < n; ++i) {
      if (results[0].data != nullptr) static_cast<double*>(results[0].data)[i] = a[i] * b[i];
      sum += a[i];
    }
    if (results.size() > 1 && results[1].data != nullptr) {
      *static_cast<double*>(results[1].data) = sum;
    }
    last_tracked.assign(tracked.begin(), tracked.end());
    if (tracked.empty()) return nullptr;
    auto kept = std::make_shared<Kept>(&alive);
    kept->a.assign(a, a + n);
    kept->b.assign(b, b + n);
    return kept;
  }

  void backward(void* kept, std::span<const int64_t> results,
                std::span<const ExternalTensor> incoming, std::span<const int64_t> operands,
                std::span<const ExternalTensor> gradients) const override {
    const auto& saved = *static_cast<Kept*>(kept);
    for (size_t k = 0; k < operands.size(); ++k) {
      for (size_t i = 0; i < saved.a.size(); ++i) {
        double sum = 0.0;
        for (size_t r = 0; r < results.size(); ++r) {
          const auto* given = static_cast<const double*>(incoming[r].data);
          if (results[r] == 0) sum += given[i] * (operands[k] == 0 ? saved.b[i] : saved.a[i]);
          if (results[r] == 1 && operands[k] == 0) sum += given[0];
        }
        static_cast<double*>(gradients[k].data)[i] = sum;
      }
    }
  }

  mutable int alive = 0;
  mutable std::vector<int64_t> last_tracked;
};

class ExternalNode : public ::testing::Test {
 protected:
  void SetUp() override { ExternalFunctions::instance().add(kKey, function_); }
  void TearDown() override { ExternalFunctions::instance().remove(kKey); }

  // Inputs a, b of a symbolic length; outputs a b and the sum of a.
  static Graph graph_of(bool b_requires_grad = true, bool sum_used = true) {
    Graph graph;
    GraphBuilder builder(graph);
    const Shape shape{Dim::symbol("n"), 2};
    const ValueId a =
        graph.add_input({.role = InputRole::user, .requires_grad = true}, "a", DType::f64, shape);
    const ValueId b = graph.add_input({.role = InputRole::user, .requires_grad = b_requires_grad},
                                      "b", DType::f64, shape);
    const std::vector<int64_t> types(2, static_cast<int64_t>(DType::f64));
    const std::vector<ValueId> made =
        builder.node(kOrtrainDomain, "External", {builder.shape_of(a), builder.int64s({}), a, b},
                     {{"callable", std::string(kKey)}, {"types", types}, {"site", int64_t{3}}},
                     {true, sum_used});
    graph.add_output({.value = made[0], .name = "product", .role = OutputRole::user});
    if (sum_used) {
      graph.add_output({.value = made[1], .name = "sum", .role = OutputRole::user});
    }
    return graph;
  }

  std::shared_ptr<Product> function_ = std::make_shared<Product>();
};

using Values = std::vector<double>;

Values values_of(const RunOutput& output) {
  const auto* data = static_cast<const double*>(output.block->data());
  return Values(data, data + output.spec.numel());
}

TEST_F(ExternalNode, ForwardAloneKeepsNothing) {
  auto session = std::make_shared<Session>(graph_of(), cpu_kernels());
  const Values a{1, 2, 3, 4}, b{5, 6, 7, 8};
  RunContext context(session, session->plan({{2, 2}, {2, 2}}));
  const std::vector<RunOutput> made = context.forward(std::vector<const void*>{a.data(), b.data()});
  EXPECT_EQ(values_of(made[0]), (Values{5, 12, 21, 32}));
  EXPECT_EQ(values_of(made[1]), Values{10});
  EXPECT_EQ(function_->alive, 0);
}

TEST_F(ExternalNode, NoFileNamesAFunctionOfTheProcess) {
  const std::string bytes = to_onnx_bytes(graph_of());
  EXPECT_THROW(load_onnx_bytes(std::as_bytes(std::span(bytes))), UnsupportedError);
}

TEST_F(ExternalNode, BackwardIsTheFunctionsOwnForAnyLength) {
  for (const bool b_requires_grad : {true, false}) {
    Graph graph = graph_of(b_requires_grad);
    build_backward(graph, {.output_indices = {0, 1}});
    graph.sort();
    auto session = std::make_shared<Session>(graph, cpu_kernels());
    for (const int64_t n : {1, 3, 1}) {
      const auto count = static_cast<size_t>(2 * n);
      const Values a(count, 2.0), b(count, 3.0), given(count, 10.0), given_sum{100.0};
      RunContext context(session, session->plan({{n, 2}, {n, 2}, {}, {}}));
      context.forward(std::vector<const void*>{a.data(), b.data(), nullptr, nullptr});
      EXPECT_EQ(function_->alive, 1);
      EXPECT_EQ(function_->last_tracked,
                (b_requires_grad ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{0}));
      const std::vector<RunOutput> made = context.backward(
          std::vector<const void*>{nullptr, nullptr, given.data(), given_sum.data()});
      EXPECT_EQ(function_->alive, 0);
      EXPECT_EQ(values_of(made[2]), Values(count, 130.0));
      ASSERT_EQ(made.size(), b_requires_grad ? 4u : 3u);
      if (b_requires_grad) {
        EXPECT_EQ(values_of(made[3]), Values(count, 20.0));
      }
    }
  }
}

TEST_F(ExternalNode, AGradientOfOneResultOnly) {
  Graph graph = graph_of();
  build_backward(graph, {.output_indices = {1}});
  graph.sort();
  auto session = std::make_shared<Session>(graph, cpu_kernels());
  const Values a{1, 2}, b{3, 4}, given{7.0};
  {
    RunContext context(session, session->plan({{1, 2}, {1, 2}, {}}));
    context.forward(std::vector<const void*>{a.data(), b.data(), nullptr});
    const std::vector<RunOutput> made =
        context.backward(std::vector<const void*>{nullptr, nullptr, given.data()});
    EXPECT_EQ(values_of(made[2]), (Values{7, 7}));
  }
  RunContext dropped(session, session->plan({{1, 2}, {1, 2}, {}}));
  dropped.forward(std::vector<const void*>{a.data(), b.data(), nullptr});
  EXPECT_EQ(function_->alive, 1);
  dropped.release();
  EXPECT_EQ(function_->alive, 0);
}

TEST_F(ExternalNode, AnUnknownFunctionIsNamed) {
  auto session = std::make_shared<Session>(graph_of(true, false), cpu_kernels());
  ExternalFunctions::instance().remove(kKey);
  try {
    session->plan({{2, 2}, {2, 2}});
    FAIL() << "planned";
  } catch (const UnsupportedError& error) {
    EXPECT_NE(std::string(error.what()).find("test::product"), std::string::npos) << error.what();
  }
  ExternalFunctions::instance().add(kKey, function_);
  EXPECT_THROW(ExternalFunctions::instance().add(kKey, function_), InternalError);
}

TEST_F(ExternalNode, RefusesWhatDoesNotFit) {
  Graph graph;
  GraphBuilder builder(graph);
  const ValueId a = graph.add_input({.role = InputRole::user}, "a", DType::i64, {Dim::symbol("n")});
  const auto add = [&](std::vector<ValueId> inputs, std::vector<int64_t> types) {
    builder.node(kOrtrainDomain, "External", std::move(inputs),
                 {{"callable", std::string(kKey)}, {"types", types}, {"site", int64_t{0}}}, {true});
  };
  EXPECT_THROW(add({a}, {1}), ShapeError);                              // contents nobody knows
  EXPECT_THROW(add({builder.int64s({2}), a}, {99}), UnsupportedError);  // no such element type
  EXPECT_THROW(add({builder.int64s({2})}, {1, 1}), InvalidModelError);  // a shape is missing
  EXPECT_THROW(add({builder.scalar(DType::f32, 1.0), a}, {1}), InvalidModelError);
  EXPECT_THROW(add({builder.int64s({-2}), a}, {1}), ShapeError);
}

}  // namespace
}  // namespace ortrain
