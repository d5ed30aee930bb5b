// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/dtype.h"

// Matrix products on the device, by a library of the device's maker where there is one that takes
// the problem, else by kernels of our own.
namespace ortrain::gpu {

// gelu is x Phi(x); gelu_tanh its approximation by tanh.
enum class Activation { none, relu, gelu, gelu_tanh };
// Of one value per column of D [n], or per row [m].
enum class BiasAlong { none, columns, rows };

// One axis of a batch: how many, and the distances in elements from one matrix to the next; 0 where
// all use the same one. D has a matrix of its own for each.
struct BatchAxis {
  int64_t count = 1;
  int64_t a = 0, b = 0, c = 0, d = 0;
};

//   Z = alpha op(A) op(B) + beta C + bias         op(A) [m, k], op(B) [k, n], Z [m, n]
//   D = activation(Z),  or, with `activation_gradient`,  D = Z * activation'(aux)
// Row-major, all of type `dtype`. The 16-bit types sum in float. float64, float32, float16 and
// bfloat16 take all of it; int32, int64, uint32 and uint64 products only (alpha 1, beta 0), modulo
// 2^32 or 2^64.
struct GemmProblem {
  DType dtype = DType::f32;
  int64_t m = 0, n = 0, k = 0;
  bool trans_a = false, trans_b = false;  // A is [k, m], B is [n, k]
  // Distances between rows in memory, in elements; 0: dense.
  int64_t lda = 0, ldb = 0, ldd = 0;
  double alpha = 1.0;
  double beta = 0.0;  // 0: C is not read
  // Element (i, j) of C is at i * c_row + j * c_column; a stride may be 0. c_column < 0: as D.
  int64_t c_row = 0, c_column = -1;
  std::vector<BatchAxis> batch = {};  // outermost first; the bias is that of all

  BiasAlong bias = BiasAlong::none;
  Activation activation = Activation::none;
  // aux = Z, for the backward; laid out as D.
  bool keep_aux = false;
  // `aux` is read: what `keep_aux` wrote.
  bool activation_gradient = false;
  // bias_gradient[n] = the sums of the columns of D over its rows and the batch, always in the same
  // order.
  bool bias_gradient = false;
  // D = op(A) op(B) as summed, float for the 16-bit types: alpha 1, nothing applied, D dense with
  // the batch in front. With beta 1 they are added to C, of the same type and laid out as D.
  bool keep_sums = false;

  DType result_type() const { return keep_sums && size_of(dtype) == 2 ? DType::f32 : dtype; }
};

// Addresses on the device. C may be D where both are laid out alike; else D overlaps no operand.
struct GemmOperands {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  const void* c = nullptr;
  const void* bias = nullptr;
  void* aux = nullptr;
  void* bias_gradient = nullptr;
};

// How a problem is done; made while planning, run any number of times from any thread. Which way,
// and whether TF32 is allowed, is decided when it is made.
class Gemm {
 public:
  // Throws InternalError for contradictions in the problem.
  explicit Gemm(const GemmProblem& problem);

  // What `run` needs as workspace, 64-byte aligned.
  ByteCount workspace_bytes() const;
  // "cublaslt" or "tiled"
  std::string_view algorithm() const;
  // Puts the work onto the stream of the current device. Throws DeviceError.
  void run(const GemmOperands& operands, void* workspace, void* stream) const;

 private:
  struct Plan;
  std::shared_ptr<const Plan> plan_;
};

// Whether products of float32 may round their factors to TF32 (8 bits of exponent, 10 of fraction),
// as torch.backends.cuda.matmul.allow_tf32 says. Of the process; false at the beginning. Only
// libraries make use of it.
void set_allow_tf32(bool allow);
bool allow_tf32();

}  // namespace ortrain::gpu
