// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/gemm_padded.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <vector>

#include "ortrain/gpu/cublaslt.h"
#include "ortrain/gpu/gemm_samples_test.h"
#include "ortrain/gpu/padded_copy.h"

namespace ortrain::gpu {
namespace {

// By a stand-in for cuBLASLt that counts the matrices which its kernels would be slow for.
class GemmPadded : public ::testing::Test {
 protected:
  void SetUp() override {
    set_cublaslt_path(ORTRAIN_CUBLASLT_STAND_IN);
    void* library = dlopen(ORTRAIN_CUBLASLT_STAND_IN, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr);
    odd_matrices_ =
        reinterpret_cast<int64_t (*)()>(dlsym(library, "ortrain_stand_in_odd_matrices"));
    ASSERT_NE(odd_matrices_, nullptr);
    odd_matrices_();
  }
  void TearDown() override {
    set_always_padding(false);
    set_cublaslt_path("");
  }
  int64_t odd_matrices() const { return odd_matrices_(); }

 private:
  int64_t (*odd_matrices_)() = nullptr;
};

GemmProblem bf16(GemmProblem p) {
  p.dtype = DType::bf16;
  return p;
}
std::string_view algorithm(const GemmProblem& p) { return Gemm(p).algorithm(); }

TEST_F(GemmPadded, ProblemsOfAllKinds) {
  set_always_padding(true);
  int padded = 0;
  for (const GemmProblem& p : problems()) {
    SCOPED_TRACE(str(p.m, " ", p.n, " ", p.k, " ", p.trans_a, p.trans_b));
    const std::string_view way = algorithm(bf16(p));
    check_gemm(p, p.k == 0 ? "tiled" : "cublaslt", 0, way);
    padded += way == "cublaslt_padded" ? 1 : 0;
  }
  EXPECT_GE(padded, 12);
}

TEST_F(GemmPadded, TheLibrarySeesWholeVectors) {
  for (const bool always : {false, true}) {
    set_always_padding(always);
    for (const bool trans_a : {false, true}) {
      for (const bool trans_b : {false, true}) {
        GemmProblem p{.m = 37, .n = 21, .k = 45, .trans_a = trans_a, .trans_b = trans_b};
        const Gemm gemm(bf16(p));
        EXPECT_EQ(gemm.algorithm(), always ? "cublaslt_padded" : "cublaslt");
        const std::vector<BFloat16> a(37 * 45), b(45 * 21);
        std::vector<BFloat16> d(37 * 21);
        std::vector<double> workspace(gemm.workspace_bytes().value() / sizeof(double) + 1);
        gemm.run({.a = a.data(), .b = b.data(), .d = d.data()}, workspace.data(), nullptr);
        EXPECT_EQ(odd_matrices() == 0, always);
      }
    }
  }
}

TEST_F(GemmPadded, AddressesOfSingleElements) {
  set_always_padding(true);
  for (const size_t offset : {1, 3}) {
    check_gemm({.m = 37, .n = 21, .k = 45, .trans_b = true, .beta = 0.5}, "cublaslt", offset,
               "cublaslt_padded");
  }
}

TEST_F(GemmPadded, PassesFollow) {
  set_always_padding(true);
  GemmProblem p{.m = 7,
                .n = 41,
                .k = 9,
                .alpha = 0.25,
                .bias = BiasAlong::columns,
                .activation = Activation::gelu_tanh,
                .keep_aux = true,
                .bias_gradient = true};
  check_gemm(p, "cublaslt", 0, "cublaslt_padded");
  p.keep_aux = false;
  p.bias = BiasAlong::none;
  p.activation_gradient = true;
  check_gemm(p, "cublaslt", 0, "cublaslt_padded");
}

// All leading dimensions as Gemm fills them in.
GemmProblem filled(GemmProblem p) {
  p.lda = or_dense(p.lda, p.trans_a ? p.m : p.k);
  p.ldb = or_dense(p.ldb, p.trans_b ? p.k : p.n);
  p.ldd = or_dense(p.ldd, p.n);
  if (p.c_column < 0) {
    p.c_row = p.ldd;
    p.c_column = 1;
    for (BatchAxis& axis : p.batch) axis.c = p.beta != 0.0 ? axis.d : 0;
  }
  return p;
}

// With copies of `most` bytes; in place where C is D.
void check_pieces(const GemmProblem& p, int64_t most, bool in_place = false) {
  SCOPED_TRACE(str(p.m, " ", p.n, " ", p.k, " ", p.trans_a, p.trans_b, " in ", most));
  const GemmProblem problem = filled(bf16(p));
  const Sizes sizes(p);
  const auto a = numbers(sizes.a, 3), b = numbers(sizes.b, 5), c = numbers(sizes.c, 7),
             bias = numbers(std::max(p.m, p.n), 2);
  const Result wanted = expected(p, a, b, c, bias, {});
  std::string why;
  const std::optional<GemmKernel> kernel = padded_gemm(problem, most, why);
  ASSERT_TRUE(kernel) << why;
  EXPECT_LE(kernel->workspace_bytes.value(), static_cast<size_t>(2 * most + 8192));
  const auto left = rounded<BFloat16>(a), right = rounded<BFloat16>(b),
             addend = rounded<BFloat16>(c), shift = rounded<BFloat16>(bias);
  std::vector<BFloat16> d =
      in_place ? addend : rounded<BFloat16>(std::vector<double>(sizes.d, -1.0));
  std::vector<double> workspace(kernel->workspace_bytes.value() / sizeof(double) + 1, NAN);
  kernel->run({.a = left.data(),
               .b = right.data(),
               .d = d.data(),
               .c = in_place ? d.data() : addend.data(),
               .bias = shift.data()},
              workspace.data(), nullptr);
  expect_near(d, wanted.d, 3e-2, "D");
}

TEST_F(GemmPadded, PiecesOfRows) {
  for (const bool trans_a : {false, true}) {
    for (const bool trans_b : {false, true}) {
      for (const int64_t m : {300, 389, 384}) {
        GemmProblem p{.m = m, .n = 19, .k = 21, .trans_a = trans_a, .trans_b = trans_b};
        for (const int64_t most : {int64_t{16384}, int64_t{24000}, kMostPaddedBytes}) {
          check_pieces(p, most);
        }
        p.beta = 0.5;
        p.alpha = 0.25;
        check_pieces(p, 16384, true);
        p.beta = 0;
        p.bias = trans_b ? BiasAlong::columns : BiasAlong::rows;
        check_pieces(p, 16384);
      }
    }
  }
  // D is written at once by all pieces but the last.
  check_pieces({.m = 389, .n = 16, .k = 24, .trans_a = true}, 12000);
}

TEST_F(GemmPadded, PiecesOfColumns) {
  for (const bool trans_b : {false, true}) {
    GemmProblem p{.m = 16, .n = 389, .k = 21, .trans_b = trans_b};
    check_pieces(p, 12000);
    p.beta = 0.5;
    p.bias = BiasAlong::columns;
    check_pieces(p, 12000, true);
    p.c_row = 0;
    p.c_column = 1;
    check_pieces(p, 12000);
  }
}

TEST_F(GemmPadded, PiecesOfABatch) {
  GemmProblem p{.m = 5, .n = 9, .k = 7, .beta = 1.0, .batch = {{11, 35, 63, 0, 45}}};
  for (const int64_t most : {700, 1000, 100000}) {
    check_pieces(p, most, true);
    p.batch[0].b = 0;  // one for all
    check_pieces(p, most);
    p.batch[0] = {11, 0, 63, 0, 45};
    check_pieces(p, most);
    p.batch[0] = {11, 35, 63, 0, 45};
  }
}

TEST_F(GemmPadded, RefusesWhatTakesTooMuchMemory) {
  std::string why;
  EXPECT_FALSE(padded_gemm(filled(bf16({.m = 300, .n = 300, .k = 21})), 1000, why));
  EXPECT_NE(why.find("1000 bytes"), std::string::npos) << why;
  EXPECT_FALSE(padded_gemm(filled(bf16({.m = 5, .n = 9, .k = 7, .batch = {{11, 35, 63, 0, 45}}})),
                           100, why));
}

TEST_F(GemmPadded, FiresWhereItPays) {
  // The output layer of GPT-2 and its gradients.
  EXPECT_EQ(algorithm(bf16({.m = 8192, .n = 50257, .k = 768, .trans_b = true})), "cublaslt_padded");
  EXPECT_EQ(algorithm(bf16({.m = 8192, .n = 768, .k = 50257})), "cublaslt_padded");
  const GemmProblem weight = bf16({.m = 50257, .n = 768, .k = 8192, .trans_a = true});
  EXPECT_EQ(algorithm(weight), "cublaslt_padded");
  EXPECT_LT(Gemm(weight).workspace_bytes().value(), size_t{300} << 20);
  EXPECT_EQ(algorithm(bf16({.m = 768, .n = 50257, .k = 8192, .trans_a = true})), "cublaslt_padded");
  GemmProblem batch = bf16({.m = 1025, .n = 1025, .k = 64, .trans_b = true});
  batch.batch = {{384, 1025 * 64, 1025 * 64, 0, 1025 * 1025}};
  EXPECT_EQ(algorithm(batch), "cublaslt");  // the result's copy takes longer
  batch.k = 1024;
  EXPECT_EQ(algorithm(batch), "cublaslt_padded");
}

TEST_F(GemmPadded, LeavesTheRestAsItIs) {
  // Even rows, small ones, and a float32 that is not rounded to TF32.
  EXPECT_EQ(algorithm(bf16({.m = 8192, .n = 50304, .k = 768, .trans_b = true})), "cublaslt");
  EXPECT_EQ(algorithm(bf16({.m = 8191, .n = 768, .k = 768, .trans_b = true})), "cublaslt");
  EXPECT_EQ(algorithm(bf16({.m = 32, .n = 1001, .k = 768, .trans_b = true})), "cublaslt");
  GemmProblem full{.m = 8192, .n = 50257, .k = 768, .trans_b = true};
  EXPECT_EQ(algorithm(full), "cublaslt");
  set_allow_tf32(true);
  EXPECT_EQ(algorithm(full), "cublaslt_padded");
  set_allow_tf32(false);
  set_cublaslt_path("");
  EXPECT_EQ(algorithm(bf16(full)), "tiled");
}

template <class T>
void check_copy(const PaddedCopy& p, size_t from_offset, size_t to_offset) {
  SCOPED_TRACE(str(p.rows, "x", p.columns, " ", p.from_ld, " to ", p.to_ld, " at ", from_offset,
                   " ", to_offset));
  const auto last = [](int64_t count, int64_t stride, int64_t rows, int64_t ld, int64_t columns) {
    return static_cast<size_t>((count - 1) * stride + (rows - 1) * ld + columns);
  };
  const size_t from_size = last(p.count, p.from_stride, p.from_rows, p.from_ld, p.from_columns);
  const size_t to_size = last(p.count, p.to_stride, p.rows, p.to_ld, p.columns);
  std::vector<T> from(from_offset + from_size), to(to_offset + to_size + 9, T{7});
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<T>(1000 + i * 31 % 5003);
  std::vector<T> wanted = to;
  for (int64_t q = 0; q < p.count; ++q) {
    for (int64_t i = 0; i < p.rows; ++i) {
      for (int64_t j = 0; j < p.columns; ++j) {
        const auto at = static_cast<size_t>(q * p.from_stride + i * p.from_ld + j);
        const bool known = i < p.from_rows && j < p.from_columns;
        wanted[to_offset + static_cast<size_t>(q * p.to_stride + i * p.to_ld + j)] =
            known ? from[from_offset + at] : T{0};
      }
    }
  }
  copy_padded(p, sizeof(T), from.data() + from_offset, to.data() + to_offset, nullptr);
  EXPECT_EQ(to, wanted);
}

TEST(PaddedCopy, EqualsReference) {
  for (const size_t from_offset : {0, 1, 5, 8}) {
    for (const size_t to_offset : {0, 3, 8}) {
      for (const int64_t columns : {1, 7, 8, 9, 61, 3000}) {
        const int64_t even = (columns + 7) / 8 * 8;
        const PaddedCopy in{.count = 2,
                            .from_rows = 5,
                            .from_columns = columns,
                            .from_ld = columns,
                            .from_stride = 5 * columns,
                            .rows = 8,
                            .columns = even,
                            .to_ld = even,
                            .to_stride = 8 * even};
        check_copy<uint16_t>(in, from_offset, to_offset);
        check_copy<uint32_t>(in, from_offset, to_offset);
        const PaddedCopy out{.count = 2,
                             .from_rows = 5,
                             .from_columns = columns,
                             .from_ld = even,
                             .from_stride = 8 * even,
                             .rows = 5,
                             .columns = columns,
                             .to_ld = columns,
                             .to_stride = 5 * columns};
        check_copy<uint16_t>(out, from_offset, to_offset);
        check_copy<uint32_t>(out, from_offset, to_offset);
      }
    }
  }
}

TEST(PaddedCopy, OneForAll) {
  check_copy<uint16_t>({.count = 3,
                        .from_rows = 2,
                        .from_columns = 5,
                        .from_ld = 9,
                        .rows = 2,
                        .columns = 5,
                        .to_ld = 5,
                        .to_stride = 10},
                       1, 0);
}

TEST(PaddedCopy, OfNothingIsZeros) {
  check_copy<uint16_t>(
      {.from_rows = 0, .from_columns = 5, .from_ld = 5, .rows = 2, .columns = 8, .to_ld = 8}, 9, 0);
}

}  // namespace
}  // namespace ortrain::gpu
