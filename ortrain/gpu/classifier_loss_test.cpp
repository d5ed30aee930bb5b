// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "ortrain/base/half.h"
#include "ortrain/gpu/cublaslt.h"
#include "ortrain/gpu/gemm_padded.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/ir/text.h"
#include "ortrain/runtime/session.h"

// What the cases of ClassifierLossGrad do not show: memory, and how long sums in 16 bits are
// rounded.
namespace ortrain {
namespace {

std::string graph_text(const std::string& type, int64_t classes, int64_t features, bool has_base) {
  const std::string c = std::to_string(classes), k = std::to_string(features);
  std::string text = "graph g (float32[] dloss, " + type + "[n, " + c +
                     "] logits, int64[n] labels, float32[n] sums, " + type + "[n, " + k + "] x, " +
                     type + "[" + c + ", " + k + "] w";
  if (has_base) text += ", " + type + "[" + c + ", " + k + "] base";
  text += ") => (dx, dw, db) {\n  scaled = Cast <to = " +
          std::string(type == "bfloat16"  ? "16"
                      : type == "float16" ? "10"
                                          : "1") +
          "> (dloss)\n  dx, dw, db = ortrain::ClassifierLossGrad <reduction = \"sum\"> (scaled, "
          "logits, labels, sums, x, w" +
          std::string(has_base ? ", base" : "") + ")\n}";
  return text;
}

size_t workspace(const std::string& type, int64_t rows, int64_t classes, int64_t features) {
  Session session(parse_graph(graph_text(type, classes, features, false)), gpu::kernels(0));
  const auto plan =
      session.plan({{}, {rows, classes}, {rows}, {rows}, {rows, features}, {classes, features}});
  size_t bytes = 0;
  for (const PlanStep& step : plan->steps) bytes = std::max(bytes, step.workspace_bytes);
  return bytes;
}

TEST(ClassifierLossGrad, MemoryDoesNotGrowWithTheRows) {
  constexpr int64_t kClasses = 520, kFeatures = 16;
  for (const std::string type : {"float32", "bfloat16", "float16"}) {
    const size_t size = type == "float32" ? 4 : 2;
    const size_t many = workspace(type, 65536, kClasses, kFeatures);
    EXPECT_EQ(many, workspace(type, 16384, kClasses, kFeatures)) << type;
    const size_t parts = 256 * kClasses * sizeof(float);  // of the bias
    EXPECT_LT(many, kClasses * (2048 * size + 2 * 4 * kFeatures) + parts + 65536) << type;
  }
  // The weight gradient in float would be more than the rows that it saves.
  EXPECT_LT(workspace("bfloat16", 2112, 8, 4096), size_t{8 * 4096 * 4});
}

// Exact in double; sums of all rows of 16-bit products, whose terms are all of one sign, so that
// roundings on the way would show.
template <class T>
void expect_one_rounding(const std::string& type, bool has_base) {
  constexpr int64_t kRows = 24000, kClasses = 4, kFeatures = 3;
  const auto count = [](int64_t n) { return static_cast<size_t>(n); };
  const float dloss = 1;
  std::vector<T> logits(count(kRows * kClasses), T(0.0f)), x, w(count(kClasses * kFeatures));
  std::vector<T> base(count(kClasses * kFeatures), T(100.0f));
  std::vector<int64_t> labels;
  std::vector<float> sums(count(kRows), std::log(4.0f));
  for (int64_t i = 0; i < kRows * kFeatures; ++i) {
    x.push_back(T(static_cast<float>(64 + i * 37 % 61) / 1024));
  }
  for (int64_t i = 0; i < kRows; ++i) labels.push_back(i % 2);
  auto session = std::make_shared<Session>(
      parse_graph(graph_text(type, kClasses, kFeatures, has_base)), gpu::kernels(0));
  std::vector<const void*> inputs{&dloss,      logits.data(), labels.data(),
                                  sums.data(), x.data(),      w.data()};
  std::vector<Dims> dims{{},      {kRows, kClasses},  {kRows},
                         {kRows}, {kRows, kFeatures}, {kClasses, kFeatures}};
  if (has_base) {
    inputs.push_back(base.data());
    dims.push_back({kClasses, kFeatures});
  }
  RunContext context(session, session->plan(dims));
  const std::vector<RunOutput> outputs = context.forward(inputs);
  const T* dweight = static_cast<const T*>(outputs[1].block->data());
  const double digits = type == "bfloat16" ? 256 : 2048;  // 1 / the distance of numbers at 1
  for (int64_t c = 0; c < kClasses; ++c) {
    for (int64_t k = 0; k < kFeatures; ++k) {
      double exact = has_base ? 100 : 0;
      for (int64_t row = 0; row < kRows; ++row) {
        const double dlogit = 0.25 - (labels[count(row)] == c ? 1.0 : 0.0);
        exact += dlogit * static_cast<double>(static_cast<float>(x[count(row * kFeatures + k)]));
      }
      const double got = static_cast<double>(static_cast<float>(dweight[c * kFeatures + k]));
      EXPECT_NEAR(got, exact, 1.02 * std::abs(exact) / digits)
          << type << " class " << c << " feature " << k;
    }
  }
}

TEST(ClassifierLossGrad, SumsOfManyRowsAreRoundedOnce) {
  for (const bool has_base : {false, true}) {
    expect_one_rounding<BFloat16>("bfloat16", has_base);
    expect_one_rounding<Float16>("float16", has_base);
  }
}

// Results of all three gradients for rows of 11 classes, side by side.
std::vector<float> gradients_of_odd_rows(int64_t rows, bool has_base) {
  constexpr int64_t kClasses = 11, kFeatures = 5;
  const auto numbers = [](int64_t count, int64_t step) {
    std::vector<BFloat16> values;
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(BFloat16(static_cast<float>(i * step % 17 - 8) / 16));
    }
    return values;
  };
  const float dloss = 1;
  const auto logits = numbers(rows * kClasses, 5), x = numbers(rows * kFeatures, 3);
  const auto w = numbers(kClasses * kFeatures, 7), base = numbers(kClasses * kFeatures, 2);
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < rows; ++i) labels.push_back(i % kClasses);
  const std::vector<float> sums(static_cast<size_t>(rows), std::log(12.0f));
  auto session = std::make_shared<Session>(
      parse_graph(graph_text("bfloat16", kClasses, kFeatures, has_base)), gpu::kernels(0));
  std::vector<const void*> inputs{&dloss,      logits.data(), labels.data(),
                                  sums.data(), x.data(),      w.data()};
  std::vector<Dims> dims{{},     {rows, kClasses},  {rows},
                         {rows}, {rows, kFeatures}, {kClasses, kFeatures}};
  if (has_base) {
    inputs.push_back(base.data());
    dims.push_back({kClasses, kFeatures});
  }
  RunContext context(session, session->plan(dims));
  const std::vector<RunOutput> outputs = context.forward(inputs);
  const int64_t counts[] = {rows * kFeatures, kClasses * kFeatures, kClasses};
  std::vector<float> results;
  for (size_t k = 0; k < 3; ++k) {
    const auto* from = static_cast<const BFloat16*>(outputs[k].block->data());
    for (int64_t i = 0; i < counts[k]; ++i) results.push_back(static_cast<float>(from[i]));
  }
  return results;
}

// At once, and in chunks whose weight gradients are summed in float.
TEST(ClassifierLossGrad, PaddingChangesNothing) {
  for (const char* path : {"", ORTRAIN_CUBLASLT_STAND_IN}) {
    gpu::set_cublaslt_path(path);
    for (const int64_t rows : {300, 4500}) {
      for (const bool has_base : {false, true}) {
        const std::vector<float> wanted = gradients_of_odd_rows(rows, has_base);
        gpu::set_always_padding(true);
        const std::vector<float> padded = gradients_of_odd_rows(rows, has_base);
        gpu::set_always_padding(false);
        ASSERT_EQ(padded.size(), wanted.size());
        for (size_t i = 0; i < wanted.size(); ++i) {
          ASSERT_NEAR(padded[i], wanted[i], 0.005f * std::max(1.0f, std::abs(wanted[i])))
              << rows << " " << has_base << " " << i;
        }
      }
    }
  }
  gpu::set_cublaslt_path("");
}

}  // namespace
}  // namespace ortrain
