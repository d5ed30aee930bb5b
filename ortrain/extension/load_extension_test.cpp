// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/extension/load_extension.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <span>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/error.h"
#include "ortrain/extension/host.h"
#include "ortrain/ir/onnx_io.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/text.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const std::vector<std::string>& example() {
  static const std::vector<std::string> names = load_extension(ORTRAIN_EXAMPLE_EXTENSION);
  return names;
}

TEST(LoadExtension, AddsTheOperatorsOnce) {
  EXPECT_THAT(example(), Contains("example::ScaledSwish"));
  EXPECT_EQ(load_extension(ORTRAIN_EXAMPLE_EXTENSION), example());
  const OpDef& def = op_registry().get("example", "ScaledSwish");
  EXPECT_EQ(def.differentiability(), Differentiability::rule);
  EXPECT_EQ(cpu_kernels().find("example", "ScaledSwish").size(), 1u);
}

TEST(LoadExtension, RunsForwardAndBackward) {
  example();
  Graph graph = parse_graph(
      "graph g (float64[n, 3] x [user grad]) => (y) {\n"
      "  y = example::ScaledSwish <beta = 1.5> (x)\n}\n");
  EXPECT_EQ(graph.value(graph.outputs()[0].value).shape,
            graph.value(graph.inputs()[0].value).shape);
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  auto session = std::make_shared<Session>(graph, cpu_kernels());
  const std::vector<double> x{-2, -0.5, 0, 0.25, 1, 3};
  const std::vector<double> dy{1, 2, -1, 0.5, 1, 4};
  RunContext run(session, session->plan({{2, 3}, {}}));
  const std::vector<const void*> inputs{x.data(), nullptr};
  const auto outputs = run.forward(inputs);
  const std::vector<const void*> incoming{nullptr, dy.data()};
  const auto gradients = run.backward(incoming);
  for (size_t i = 0; i < x.size(); ++i) {
    const double s = 1 / (1 + std::exp(-1.5 * x[i]));
    EXPECT_NEAR(static_cast<const double*>(outputs[0].block->data())[i], x[i] * s, 1e-14);
    EXPECT_NEAR(static_cast<const double*>(gradients[1].block->data())[i],
                dy[i] * (s + 1.5 * x[i]* s*(1 - s)), 1e-14);
  }
}

TEST(LoadExtension, ItsOperatorsAreSavedAndLoaded) {
  example();
  const Graph graph = parse_graph(
      "graph g (float32[n] x) => (y) {\n  y = example::ScaledSwish <beta = 0.5> (x)\n}\n");
  const std::string bytes = to_onnx_bytes(graph);
  const Graph again = load_onnx_bytes(std::as_bytes(std::span(bytes)));
  EXPECT_EQ(print_graph(again), print_graph(graph));
}

TEST(LoadExtension, ErrorsOfALibraryKeepTheirKindAndNameTheNode) {
  example();
  EXPECT_THAT(
      [] {
        parse_graph(
            "graph g (float32[2] x, float32[3] d) => (y) {\n"
            "  y = example::ScaledSwishGrad (x, d) @layer\n}\n");
      },
      ThrowsMessage<ShapeError>(
          ::testing::AllOf(HasSubstr("layer"), HasSubstr("x and dy differ in shape"))));
  EXPECT_THAT(
      [] { parse_graph("graph g (int32[2] x) => (y) {\n  y = example::ScaledSwish (x)\n}\n"); },
      ThrowsMessage<DTypeError>(HasSubstr("int32")));
}

TEST(LoadExtension, RefusesWhatIsNoLibraryOfOperators) {
  EXPECT_THAT([] { load_extension("/nowhere/lib.so"); },
              ThrowsMessage<FileError>(HasSubstr("/nowhere/lib.so")));
  const std::filesystem::path text = std::filesystem::path(::testing::TempDir()) / "no_library.so";
  {
    std::ofstream(text) << "text";
  }
  EXPECT_THAT([&] { load_extension(text); }, ThrowsMessage<FileError>(HasSubstr("no_library")));
  EXPECT_THAT([] { load_extension("/lib/x86_64-linux-gnu/libm.so.6"); },
              ThrowsMessage<InvalidModelError>(HasSubstr("ortrain_extension")));
}

// An operator as a library hands it over; the tests spoil one thing each.
struct Definition {
  int32_t f32 = 1;
  OrtrainTypeVariable type{"T", &f32, 1};
  OrtrainFormal input{"x", "T", kOrtrainSingle};
  OrtrainFormal output{"y", "T", kOrtrainSingle};
  OrtrainOperator op{};

  Definition() {
    op.size = sizeof(OrtrainOperator);
    op.domain = "test";
    op.name = "Op";
    op.since = 1;
    op.inputs = &input;
    op.num_inputs = 1;
    op.outputs = &output;
    op.num_outputs = 1;
    op.types = &type;
    op.num_types = 1;
    op.differentiable = 1;
    op.infer = [](void*, OrtrainContext*) -> int32_t { return 0; };
    op.prepare = [](void*, OrtrainContext*, void**) -> int32_t { return 0; };
    op.run = [](void*, const void* const*, void* const*, void*) -> int32_t { return 0; };
    op.release = [](void*) {};
  }
};

std::string refusal(const OrtrainOperator& op) {
  try {
    extension::entry_of(op);
  } catch (const InvalidModelError& error) {
    return error.what();
  }
  return "";
}

TEST(LoadExtension, RefusesWrongDefinitions) {
  EXPECT_EQ(refusal(Definition().op), "");
  Definition size;
  size.op.size = 8;
  EXPECT_THAT(refusal(size.op), HasSubstr("another version"));
  for (const char* domain : {"ortrain", "ai.onnx", "ai.onnx.ml"}) {
    Definition own;
    own.op.domain = domain;
    EXPECT_THAT(refusal(own.op), HasSubstr("not for extensions"));
  }
  for (const char* missing : {static_cast<const char*>(nullptr), ""}) {
    Definition name;
    name.op.name = missing;
    EXPECT_THAT(refusal(name.op), HasSubstr("no name"));
  }
  Definition no_infer;
  no_infer.op.infer = nullptr;
  EXPECT_THAT(refusal(no_infer.op), HasSubstr("inference"));
  Definition no_kernel;
  no_kernel.op.prepare = nullptr;
  EXPECT_THAT(refusal(no_kernel.op), HasSubstr("kernel"));
  Definition unknown_type;
  unknown_type.f32 = 99;
  EXPECT_THAT(refusal(unknown_type.op), HasSubstr("99"));
  Definition variable;
  variable.input.type = "U";
  EXPECT_THAT(refusal(variable.op), HasSubstr("'U'"));
  Definition arity;
  arity.input.arity = 7;
  EXPECT_THAT(refusal(arity.op), HasSubstr("arity"));
  Definition outputs;
  outputs.op.num_outputs = 0;
  EXPECT_THAT(refusal(outputs.op), HasSubstr("no outputs"));
  Definition inplace;
  const int32_t pair[] = {0, 1};
  inplace.op.inplace = pair;
  inplace.op.num_inplace = 1;
  EXPECT_THAT(refusal(inplace.op), HasSubstr("in place"));
  Definition gradient;
  gradient.op.differentiable = 0;
  gradient.op.gradient = [](void*, OrtrainContext*) -> int32_t { return 0; };
  EXPECT_THAT(refusal(gradient.op), HasSubstr("by definition"));
}

TEST(LoadExtension, RefusesListsAndTextsThatAreNotThere) {
  for (const auto take : {+[](OrtrainOperator& op) { op.inputs = nullptr; },
                          +[](OrtrainOperator& op) { op.types = nullptr; },
                          +[](OrtrainOperator& op) { op.num_attributes = 1; },
                          +[](OrtrainOperator& op) { op.num_inplace = 1; }}) {
    Definition definition;
    take(definition.op);
    EXPECT_THAT(refusal(definition.op), HasSubstr("there is no list"));
  }
  Definition types;
  types.type.types = nullptr;
  EXPECT_THAT(refusal(types.op), HasSubstr("element types"));
  OrtrainFormalAttribute attribute{};
  attribute.has_default = 1;
  attribute.value.name = "a";
  attribute.value.count = 2;
  Definition defaults;
  defaults.op.attributes = &attribute;
  defaults.op.num_attributes = 1;
  for (const int32_t kind : {kOrtrainString, kOrtrainInts, kOrtrainFloats}) {
    attribute.value.kind = kind;
    EXPECT_THAT(refusal(defaults.op), HasSubstr("there is no"));
  }
}

TEST(LoadExtension, MistakesOfALibraryAreNotTheEngines) {
  const auto error_of = [](const OrtrainOperator& op) -> std::string {
    const OpDef def = extension::entry_of(op).def;
    const Node node{.op = "Op", .outputs = {0}};
    try {
      infer_node(def, node, {{DType::f32, {Dim(2)}, {}, {}}});
    } catch (const InternalError&) {
      return "InternalError";
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  Definition nothing_set;
  EXPECT_THAT(error_of(nothing_set.op), HasSubstr("leaves output 0 out"));
  Definition no_reason;
  no_reason.op.infer = [](void*, OrtrainContext*) -> int32_t { return 1; };
  EXPECT_THAT(error_of(no_reason.op), HasSubstr("gave no reason"));
}

TEST(LoadExtension, FunctionsRefuseNullPointers) {
  const OrtrainHost& host = extension::host();
  Graph graph = parse_graph("graph g (float32[n] x [user grad]) => (y) {\n  y = Relu(x)\n}");
  const Node& node = graph.node(graph.order()[0]);
  OrtrainContext context{.attributes = AttributeReader(op_registry().get("", "Relu"), node)};
  OrtrainAttribute attribute{};
  EXPECT_NE(host.attribute(&context, nullptr, kOrtrainInt, &attribute), 0);
  EXPECT_NE(host.attribute(&context, "alpha", kOrtrainInt, nullptr), 0);
  InferContext infer(op_registry().get("", "Relu"), node, {{DType::f32, {Dim(2)}, {}, {}}});
  context.infer = &infer;
  EXPECT_NE(host.set_output(&context, 0, 1, nullptr, 1), 0);
  EXPECT_THAT(host.last_error(), HasSubstr("extents"));
  EXPECT_EQ(host.set_output(&context, 0, 1, nullptr, 0), 0);
}

TEST(LoadExtension, FunctionsOfOtherStagesAreRefused) {
  const OrtrainHost& host = extension::host();
  const OpDef& def = op_registry().get("", "Relu");
  const Node node{.op = "Relu"};
  OrtrainContext context{.attributes = AttributeReader(def, node)};
  InferContext infer(def, node, {{DType::f32, {Dim::symbol("n")}, {}, {}}});
  context.infer = &infer;
  int32_t value = 0;
  EXPECT_NE(host.add_scalar(&context, 1, 0.0, &value), 0);
  EXPECT_THAT(host.last_error(), HasSubstr("gradient"));
  EXPECT_NE(host.request_workspace(&context, 8), 0);
  OrtrainDim dim{};
  EXPECT_NE(host.input_dim(&context, 0, 1, &dim), 0);
  EXPECT_NE(host.input_dim(&context, 3, 0, &dim), 0);
  EXPECT_NE(host.dim_operation(&context, 0, {12, 1}, {1, 0}, &dim), 0);
  EXPECT_NE(host.set_output(&context, 0, 99, &dim, 0), 0);
  ASSERT_EQ(host.input_dim(&context, 0, 0, &dim), 0);
  EXPECT_EQ(dim.is_symbolic, 1);
  OrtrainDim twice{};
  ASSERT_EQ(host.dim_operation(&context, kOrtrainDimMul, dim, {2, 0}, &twice), 0);
  EXPECT_EQ(context.dims.back().str(), "2*n");
}

}  // namespace
}  // namespace ortrain
