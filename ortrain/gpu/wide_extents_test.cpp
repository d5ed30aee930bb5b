// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Extents that 32 bits do not hold: refused while planning, or run on memory of which nearly no
// page is touched.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/expr_kernel_plan.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/index_lists.h"
#include "ortrain/gpu/window_copy.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/testing/harness.h"

namespace ortrain::gpu {
namespace {

using ::testing::HasSubstr;
using Ints = std::vector<int64_t>;

constexpr int64_t kFar = int64_t{1} << 31;

// Zeros that take no memory until somebody writes there.
class Sparse {
 public:
  explicit Sparse(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Sparse() {
    if (exists()) munmap(data_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  bool exists() const { return data_ != MAP_FAILED; }
  template <class T>
  T* as() {
    return static_cast<T*>(data_);
  }

 private:
  size_t bytes_;
  void* data_;
};

// Why the kernel does not take the node; "" if it does.
std::string why_not(const Node& node, const std::vector<TensorSpec>& inputs,
                    const std::vector<TensorSpec>& outputs, const char* kernel) {
  const NodeSpec spec(op_registry().get(node.domain, node.op), node, inputs, outputs, {});
  std::string why;
  return kernels(0).select_named(spec, kernel, &why) == nullptr ? why : "";
}

Node own(const char* op, Attributes attributes = {}) {
  Node node;
  node.domain = kOrtrainDomain;
  node.op = op;
  node.attributes = std::move(attributes);
  return node;
}

TEST(WideExtents, HeadsOfAttention) {
  const auto refusal = [](DType type, int64_t head, int64_t value, const char* kernel) {
    const TensorSpec q{type, {1, 1, 1, head}}, v{type, {1, 1, 1, value}};
    const TensorSpec lse{type == DType::f64 ? DType::f64 : DType::f32, {1, 1, 1}};
    const std::string forward = why_not(own("Attention"), {q, q, v}, {v, lse}, kernel);
    EXPECT_EQ(why_not(own("AttentionGrad"), {v, q, q, v, v, lse}, {q, q, v}, kernel), forward);
    return forward;
  };
  constexpr int64_t kWrapsTo64 = (int64_t{1} << 32) + 64;
  EXPECT_EQ(refusal(DType::f32, 64, 64, "tiles"), "");
  for (const char* kernel : {"fragments", "tiles"}) {
    EXPECT_THAT(refusal(DType::f16, kWrapsTo64, 64, kernel), HasSubstr("wider than 1048576"));
    EXPECT_THAT(refusal(DType::f16, 64, kWrapsTo64, kernel), HasSubstr("wider than 1048576"));
  }
}

TEST(WideExtents, BlocksOfALaunch) {
  const TensorSpec heads{DType::f32, {kFar, 1, 1, 1}}, lse{DType::f32, {kFar, 1, 1}};
  EXPECT_THAT(why_not(own("Attention"), {heads, heads, heads}, {heads, lse}, "tiles"),
              HasSubstr("more tiles"));
  const auto norm = [](int64_t channels) {
    Node node;
    node.op = "InstanceNormalization";
    const TensorSpec x{DType::f32, {1, channels, 8}}, scale{DType::f32, {channels}};
    return why_not(node, {x, scale, scale}, {x}, "units");
  };
  EXPECT_EQ(norm(kFar - 1), "");
  EXPECT_THAT(norm(kFar), HasSubstr("units of 8 elements"));
  const TensorSpec x{DType::f32, {1, kFar, 8}}, channels{DType::f32, {kFar}};
  EXPECT_THAT(why_not(own("BatchNormTraining"), {x, channels, channels, channels, channels},
                      {x, channels, channels, channels, channels}, "units"),
              HasSubstr("units of 8 elements"));
  const TensorSpec rows{DType::f32, {kFar, 1}}, offsets{DType::i64, {kFar}};
  EXPECT_THAT(
      why_not(own("GroupedMatMul"), {rows, {DType::f32, {kFar, 1, 1}}, offsets}, {rows}, "tiles"),
      HasSubstr("2181038080 tiles"));
}

TEST(WideExtents, WindowsThatShareAnAxisOut) {
  const auto refusal = [](int64_t in, int64_t out) {
    return why_not(own("AdaptiveAveragePool", {{"output_size", Ints{out}}}),
                   {{DType::f32, {1, 1, in}}}, {{DType::f32, {1, 1, out}}}, "gather");
  };
  EXPECT_EQ(refusal(int64_t{1} << 40, 7), "");
  EXPECT_THAT(refusal(int64_t{1} << 32, int64_t{1} << 31), HasSubstr("windows of 4294967296"));
}

TEST(WideExtents, RowsWithoutElements) {
  const auto is_wide = [](const Dims& dims) {
    return ExprKernelPlan(ExprProgram::parse("expr 1\n%0 = input float32\n%1 = row_sum float32 "
                                             "%0\noutput %1 float32\n"),
                          {dims}, true)
        .shape()
        .wide;
  };
  EXPECT_FALSE(is_wide({kFar - 1, 0}));
  EXPECT_TRUE(is_wide({kFar, 0}));
  EXPECT_TRUE(is_wide({0, kFar}));
  EXPECT_TRUE(is_wide({kFar, 1}));
}

TEST(WideExtents, WindowsFarFromTheOutput) {
  // 2^54 rows of 2^10 elements are 0 in 64 bits.
  constexpr int64_t kRows = 4, kColumns = 1 << 10;
  const std::vector<float> in(kRows * kColumns, 1.0f);
  const float outside = 7.0f;
  for (const int64_t start : {int64_t{1} << 54, -(int64_t{1} << 54), kRows, -kRows, int64_t{1}}) {
    std::vector<float> out(in.size(), -1.0f);
    WindowCopy(sizeof(float), {{kRows, start, 1, kRows, kColumns}, {kColumns, 0, 1, kColumns, 1}},
               Outside::value)
        .run(in.data(), out.data(), &outside, nullptr);
    std::vector<float> wanted(in.size(), outside);
    if (start == 1) std::fill(wanted.begin() + kColumns, wanted.end(), 1.0f);
    EXPECT_EQ(out, wanted) << start;
  }
}

TEST(WideExtents, PositionsUpToTheEndOfInt) {
  const std::vector<int32_t> starts{static_cast<int32_t>(kFar - 6), static_cast<int32_t>(kFar - 1)};
  Sparse positions(kFar * 4);
  if (!positions.exists()) GTEST_SKIP() << "no address space";
  for (int32_t i = 0; i < 5; ++i) positions.as<int32_t>()[starts[0] + i] = i;
  const std::vector<float> updates{1, 2, 3, 4, 5};
  float sum = -1;
  apply_lists(DType::f32, {starts.data(), positions.as<int32_t>()},
              {.positions = 5, .targets = 1, .inner = 1}, Reduction::add, nullptr, updates.data(),
              &sum, nullptr, nullptr);
  EXPECT_EQ(sum, 15);
}

TEST(WideExtents, TapsOfALongAxis) {
  constexpr int64_t kIn = int64_t{1} << 32, kOut = 4;
  Sparse x(kIn * 4);
  if (!x.exists()) GTEST_SKIP() << "no address space";
  for (int64_t i = 0; i < kOut; ++i) x.as<float>()[i * (kIn / kOut)] = static_cast<float>(i + 1);
  Node node;
  node.op = "Resize";
  node.attributes = {{"mode", "nearest"},
                     {"coordinate_transformation_mode", "asymmetric"},
                     {"nearest_mode", "floor"}};
  NodeSpec spec(op_registry().get("", "Resize"), node,
                {{DType::f32, {kIn}}, {}, {}, {DType::i64, {1}}}, {{DType::f32, {kOut}}},
                {nullptr, nullptr, nullptr, &kOut});
  std::vector<float> y(kOut);
  const void* in[] = {x.as<void>(), nullptr, nullptr, &kOut};
  void* out[] = {y.data()};
  std::string why;
  const Kernel* kernel = kernels(0).select_named(spec, "passes", &why);
  ASSERT_NE(kernel, nullptr) << why;
  kernel->make(spec)({.in = in, .out = out, .workspace = nullptr});
  EXPECT_EQ(y, (std::vector<float>{1, 2, 3, 4}));
}

TEST(WideExtents, DivisorOfMuchPadding) {
  constexpr int64_t kKernel = 1 << 22;  // its third power is 0 in 64 bits
  const Ints pads{kKernel - 1, kKernel - 1, kKernel - 1, 0, 0, 0};
  const testing::OpCase op_case{
      .op = "AveragePool",
      .name = "much_padding",
      .inputs = {testing::CaseInput::literal(DType::f32, {1, 1, 1, 1, 1}, {0x1p66})},
      .attributes = {{"kernel_shape", Ints{kKernel, kKernel, kKernel}},
                     {"pads", pads},
                     {"count_include_pad", int64_t{1}}}};
  const std::vector<TensorData> y =
      testing::run_kernel(op_case, testing::make_inputs(op_case, DType::f32), "gather", kernels(0));
  EXPECT_EQ(y[0].data_as<float>()[0], 1.0f);
}

TEST(WideExtents, BinsOfLargeNumbers) {
  const testing::OpCase op_case{
      .op = "ortrain::BinCount",
      .name = "large_numbers",
      .inputs = {testing::CaseInput::literal(DType::f32, {4}, {0, 1e38, 2e38, 3e38})},
      .attributes = {{"bins", int64_t{6}}}};
  const std::vector<TensorData> counts = testing::run_kernel(
      op_case, testing::make_inputs(op_case, DType::f32), "counters", kernels(0));
  const float* values = counts[0].data_as<float>();
  EXPECT_EQ(values[0], 1);
  EXPECT_EQ(values[5], 1);
  EXPECT_EQ(values[2] + values[1], 1);  // 1e38, between the second and the third
  EXPECT_EQ(values[4] + values[3], 1);
}

}  // namespace
}  // namespace ortrain::gpu
