// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/cudnn.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "ortrain/gpu/gpu_device.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ops/attention/attention_cudnn.h"
#include "ortrain/ops/conv/conv_cudnn.h"
#include "ortrain/testing/harness.h"
#include "tests/cpp/cudnn_stand_in.h"

// What goes to cuDNN, and how, on a stand-in for it.
namespace ortrain::gpu {
namespace {

using testing::CudnnStandIn;
using ::testing::HasSubstr;
using Direction = CudnnConvolution::Direction;

class CudnnTest : public ::testing::Test {
 protected:
  void SetUp() override {
    use("all");
    set_cudnn(library);
  }
  void TearDown() override {
    unsetenv("ORTRAIN_CUDNN");
    set_cudnn(nullptr);
    set_allow_tf32_convolutions(false);
  }
  static void use(const char* value) { setenv("ORTRAIN_CUDNN", value, 1); }

  // Runs the cases of the operators by the library's kernel; returns those that it took.
  static std::set<std::string> taken(const std::map<std::string, const char*>& operators) {
    KernelRegistry registry(device(0));
    for (const auto& [name, domain] : operators) {
      const Kernel& first = kernels(0).find(domain, name).front();
      EXPECT_EQ(first.name, "cudnn");
      registry.add(*domain == 0 ? name : str(domain, "::", name), {first});
    }
    std::set<std::string> names;
    for (const testing::OpCase& op_case : testing::all_cases().all()) {
      const size_t colons = op_case.op.find("::");
      const std::string name = op_case.op.substr(colons == std::string::npos ? 0 : colons + 2);
      if (!operators.contains(name) || op_case.refusal) continue;
      for (const testing::CheckRow& row : testing::check_kernels(op_case, registry)) {
        if (row.refused) continue;
        EXPECT_TRUE(row.passed) << row.name << " " << name_of(row.type) << ": " << row.message;
        names.insert(row.name);
      }
    }
    return names;
  }

  std::shared_ptr<CudnnStandIn> library = std::make_shared<CudnnStandIn>();
};

ops::ConvProblem plane(int64_t groups, ops::WindowAxis rows, ops::WindowAxis columns) {
  return {.batch = 2,
          .groups = groups,
          .in_channels = 4,
          .out_channels = 8,
          .spatial_rank = 2,
          .axes = {{}, rows, columns}};
}

TEST_F(CudnnTest, ConvolutionsEqualReference) {
  const auto names = taken({{"Conv", ""},
                            {"ConvTranspose", ""},
                            {"ConvInputGrad", "ortrain"},
                            {"ConvWeightGrad", "ortrain"}});
  for (const char* op : {"Conv", "ortrain::ConvInputGrad", "ortrain::ConvWeightGrad"}) {
    for (const char* name :
         {"line", "line_strided", "padded", "strided", "dilated", "dilated_strided", "grouped",
          "depthwise_doubled", "pointwise_strided", "same_lower", "volume", "volume_grouped",
          "whole_kernel", "many_channels_grouped"}) {
      EXPECT_TRUE(names.contains(str(op, "/", name))) << op << " " << name;
    }
    for (const char* name : {"far_padding", "uneven_pads", "empty_batch", "cropped"}) {
      EXPECT_FALSE(names.contains(str(op, "/", name))) << op << " " << name;
    }
  }
  for (const char* name : {"plain", "line", "output_padding", "grouped", "volume"}) {
    EXPECT_TRUE(names.contains(str("ConvTranspose/", name))) << name;
  }
}

TEST_F(CudnnTest, AttentionEqualsReference) {
  const auto names = taken({{"Attention", "ortrain"}, {"AttentionGrad", "ortrain"}});
  for (const char* name :
       {"self", "cross", "causal", "causal_more_keys", "causal_more_queries", "scale",
        "grouped_heads", "packed", "packed_grouped", "grouped_heads_of_64"}) {
    EXPECT_TRUE(names.contains(str("ortrain::Attention/", name))) << name;
    EXPECT_TRUE(names.contains(str("ortrain::AttentionGrad/", name, "_float32"))) << name;
  }
  for (const char* name : {"bool_mask", "key_padding", "no_keys", "no_queries", "no_batch"}) {
    EXPECT_FALSE(names.contains(str("ortrain::Attention/", name))) << name;
  }
  for (const std::string& name : names) {
    EXPECT_EQ(name.find("dropout"), std::string::npos) << name;
    EXPECT_EQ(name.find("sequences"), std::string::npos) << name;
  }
}

TEST_F(CudnnTest, DescribesConvolutions) {
  std::string why;
  const ConvNode node{
      Direction::forward,
      plane(2, {.in = 9, .out = 4, .kernel = 3, .stride = 2, .pad_begin = 1, .pad_end = 7},
            {.in = 8, .out = 9, .kernel = 2, .dilation = 2, .pad_begin = 1, .pad_end = 2}),
      true};
  const auto p = cudnn_convolution(node, DType::bf16, why);
  ASSERT_TRUE(p) << why;
  EXPECT_EQ(p->x, (Dims{2, 4, 9, 8}));
  EXPECT_EQ(p->w, (Dims{8, 2, 3, 2}));
  EXPECT_EQ(p->y, (Dims{2, 8, 4, 9}));
  EXPECT_EQ(p->strides, (Dims{2, 1}));
  EXPECT_EQ(p->dilations, (Dims{1, 2}));
  EXPECT_EQ(p->pads_begin, (Dims{1, 1}));
  EXPECT_EQ(p->pads_end, (Dims{0, 2}));  // what the windows reach
  EXPECT_TRUE(p->has_bias);
  EXPECT_FALSE(p->rounds_to_tf32);
}

TEST_F(CudnnTest, RoundsFloatsWhereProductsMay) {
  std::string why;
  const ops::WindowAxis axis{.in = 5, .out = 3, .kernel = 3};
  const ConvNode node{Direction::weight, plane(1, axis, axis)};
  set_allow_tf32_convolutions(true);
  EXPECT_TRUE(cudnn_convolution(node, DType::f32, why)->rounds_to_tf32);
  EXPECT_FALSE(cudnn_convolution(node, DType::f16, why)->rounds_to_tf32);
}

TEST_F(CudnnTest, RefusesWindowsThatItHasNot) {
  std::string why;
  const ops::WindowAxis axis{.in = 5, .out = 3, .kernel = 3};
  const auto refused = [&](const ops::WindowAxis& other) {
    return !cudnn_convolution({Direction::forward, plane(1, axis, other)}, DType::f32, why);
  };
  EXPECT_TRUE(refused({.in = 5, .out = 2, .kernel = 3, .pad_begin = -1}));
  EXPECT_THAT(why, HasSubstr("crop"));
  EXPECT_TRUE(refused({.in = 5, .out = 2, .kernel = 3, .pad_end = -1}));
  EXPECT_THAT(why, HasSubstr("crop"));
  EXPECT_TRUE(refused({.in = 5, .out = 6, .kernel = 3, .pad_begin = 3}));
  EXPECT_THAT(why, HasSubstr("padding alone"));
  EXPECT_TRUE(refused({.in = 0, .out = 1, .kernel = 3, .pad_begin = 2, .pad_end = 1}));
  EXPECT_THAT(why, HasSubstr("nothing"));
  EXPECT_TRUE(refused({.in = int64_t{1} << 27, .out = (int64_t{1} << 27) - 2, .kernel = 3}));
  EXPECT_THAT(why, HasSubstr("2^31 elements"));
}

AttentionProblem attention(int64_t keys, int width) {
  AttentionProblem p = {};
  p.batch = p.heads = p.kv_heads = 1;
  p.queries = p.keys = keys;
  p.head_dim = p.value_dim = width;
  p.sequences = -1;
  p.scale = 0.5;
  return p;
}

TEST_F(CudnnTest, AttentionWhereItIsKnownToBeFaster) {
  use("auto");
  const auto why = [](const AttentionProblem& p, bool backward = false, int capability = 90) {
    return attention_cudnn_refuses(p, DType::bf16, backward, true, capability).value_or("");
  };
  EXPECT_EQ(why(attention(512, 64)), "");
  EXPECT_EQ(why(attention(512, 128), false, 100), "");
  EXPECT_THAT(why(attention(512, 64), false, 80), HasSubstr("sm_80"));
  EXPECT_THAT(why(attention(384, 64)), HasSubstr("384 keys"));
  EXPECT_THAT(why(attention(576, 64)), HasSubstr("multiple of 128"));
  EXPECT_THAT(why(attention(512, 136)), HasSubstr("heads of 136"));
  EXPECT_THAT(why(attention(512, 64), true), HasSubstr("fixed order"));
  AttentionProblem flat = attention(512, 64);
  flat.scale = 1e-50;
  EXPECT_THAT(why(flat), HasSubstr("0 in float"));
  use("all");
  EXPECT_EQ(why(attention(5, 8), true, 80), "");
  use("conv");
  EXPECT_THAT(why(attention(512, 64)), HasSubstr("leaves attention out"));
  use("fast");
  EXPECT_THAT(why(attention(512, 64)), HasSubstr("'fast'"));
}

TEST_F(CudnnTest, AttentionThatMeansSomethingElse) {
  const auto why = [](const AttentionProblem& p) {
    return attention_cudnn_refuses(p, DType::f16, false, true, 90).value_or("");
  };
  AttentionProblem p = attention(512, 64);
  p.drops = true;
  EXPECT_THAT(why(p), HasSubstr("dropout"));
  p = attention(512, 64);
  p.mask.kind = AttentionMask::Kind::boolean;
  EXPECT_THAT(why(p), HasSubstr("mask"));
  p = attention(512, 64);
  p.sequences = 2;
  EXPECT_THAT(why(p), HasSubstr("sequences"));
  library->has_attention = false;
  EXPECT_THAT(why(attention(512, 64)), HasSubstr("no engine"));
}

// A convolution [1, 1, 3, 3] by [1, 1, 2, 2] of ones with a bias, and what it is run with.
struct SmallConv {
  Node node{.op = "Conv", .name = "layer"};
  NodeSpec spec{*op_registry().find("", "Conv"),
                node,
                {{DType::f32, {1, 1, 3, 3}}, {DType::f32, {1, 1, 2, 2}}, {DType::f32, {1}}},
                {{DType::f32, {1, 1, 2, 2}}},
                {}};

  const Kernel* kernel() const { return kernels(0).select(spec); }
  void run(const KernelFn& made, size_t offset) {
    std::vector<float> x(9 + offset, 1.0f), w(4, 1.0f), bias(1, 0.5f), y(4);
    std::vector<char> workspace(spec.workspace_bytes().value() + 64);
    const void* in[] = {x.data() + offset, w.data(), bias.data()};
    void* out[] = {y.data()};
    made({.in = in, .out = out, .workspace = workspace.data()});
    EXPECT_EQ(y, std::vector<float>(4, 4.5f));
  }
};

TEST_F(CudnnTest, TakesAddressesOfSingleElements) {
  SmallConv conv;
  ASSERT_EQ(conv.kernel()->name, "cudnn");
  const KernelFn made = conv.kernel()->make(conv.spec);
  conv.run(made, 0);
  EXPECT_EQ(library->last_alignment, 16);
  conv.run(made, 1);
  EXPECT_EQ(library->last_alignment, 4);
  EXPECT_EQ(library->runs, 2);
}

TEST_F(CudnnTest, OwnKernelTakesAddressesThatItDoesNot) {
  library->least_alignment = 16;
  SmallConv conv;
  const KernelFn made = conv.kernel()->make(conv.spec);
  conv.run(made, 0);
  conv.run(made, 1);
  EXPECT_EQ(library->runs, 1);
}

TEST_F(CudnnTest, NodesThatAskTheSameShareAPlan) {
  for (int i = 0; i < 3; ++i) {
    SmallConv conv;
    conv.kernel()->make(conv.spec);
  }
  EXPECT_EQ(library->plans, 2);  // one of them for any address
}

TEST_F(CudnnTest, OwnKernelsWithoutIt) {
  SmallConv conv;
  use("off");
  EXPECT_EQ(conv.kernel()->name, "columns");
  use("auto");
  EXPECT_EQ(conv.kernel()->name, "cudnn");
  library->least_alignment = 32;  // no engine for anything
  set_cudnn(library);
  EXPECT_EQ(conv.kernel()->name, "columns");
  set_cudnn(nullptr);
  std::vector<std::string> refused;
  EXPECT_EQ(kernels(0).select(conv.spec, &refused)->name, "columns");
  EXPECT_THAT(refused, ::testing::ElementsAre(HasSubstr("no libcudnn.so.9 is found")));
}

TEST_F(CudnnTest, DepthwiseHasAKernelOfItsOwn) {
  const ops::WindowAxis axis{.in = 5, .out = 3, .kernel = 3};
  SmallConv conv;
  const ConvNode node{Direction::forward, plane(4, axis, axis)};
  EXPECT_EQ(conv_cudnn_refuses(conv.spec, node), std::nullopt);
  use("auto");
  EXPECT_THAT(conv_cudnn_refuses(conv.spec, node).value_or(""), HasSubstr("one channel per group"));
}

TEST(Cudnn, SaysWhyItIsNotThere) {
  std::string why;
  set_cudnn_path("/nowhere/libcudnn.so.9");
  EXPECT_EQ(find_cudnn(why), nullptr);
  EXPECT_THAT(why, HasSubstr("/nowhere/libcudnn.so.9"));
  // A library, but another.
  set_cudnn_path(ORTRAIN_CUBLASLT_STAND_IN);
  EXPECT_EQ(find_cudnn(why), nullptr);
  EXPECT_THAT(why,
              ::testing::AnyOf(HasSubstr("without cuDNN's headers"), HasSubstr("has no cudnn")));
  set_cudnn_path("");
  EXPECT_EQ(find_cudnn(why), nullptr);
  EXPECT_THAT(why, HasSubstr("no libcudnn.so.9 is found"));
}

}  // namespace
}  // namespace ortrain::gpu
