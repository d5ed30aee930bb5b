// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <map>

#include "ortrain/base/error.h"
#include "ortrain/base/narrow.h"
#include "ortrain/gpu/cublaslt.h"
#include "ortrain/gpu/gemm_kernel.h"
#include "ortrain/gpu/gpu_device.h"

// Products by cuBLASLt. It reads matrices by columns: what is D [m, n] by rows is [n, m] by
// columns, so it multiplies op(B)^T by op(A)^T, and its left factor is our B.
namespace ortrain::gpu {
namespace {

using namespace cublaslt;

constexpr size_t kMostWorkspace = size_t{32} << 20;
// What cuBLASLt asks of its workspace; the arena gives less.
constexpr uintptr_t kWorkspaceAlignment = 256;
constexpr int64_t kMostCalls = 32;   // over axes of the batch beside the one that the library knows
constexpr uint32_t kAlignment = 64;  // of what the plan places

DataType data_type(DType type) {
  switch (type) {
    case DType::f64:
      return kF64;
    case DType::f16:
      return kF16;
    case DType::bf16:
      return kBF16;
    default:
      return kF32;
  }
}

// What the library does behind the sums, or why it has nothing for it.
std::optional<uint32_t> epilogue_of(const GemmProblem& p, std::string& why) {
  uint32_t bits = p.bias == BiasAlong::columns ? uint32_t{kEpilogueBias} : 0;
  if (p.bias_gradient && !(p.activation == Activation::gelu_tanh && p.activation_gradient)) {
    why = "column sums only with the gradient of GELU";
    return std::nullopt;
  }
  if (p.bias_gradient && !p.batch.empty()) {
    why = "column sums over a batch";
    return std::nullopt;
  }
  if (p.activation == Activation::gelu) {
    why = "its GELU is the one by tanh";
    return std::nullopt;
  }
  if (p.activation == Activation::relu) {
    if (p.keep_aux || p.activation_gradient) {
      why = "it keeps bits for ReLU, not values";
      return std::nullopt;
    }
    bits |= kEpilogueRelu;
  }
  if (p.activation == Activation::gelu_tanh) {
    if ((p.keep_aux || p.activation_gradient) && p.ldd % 8 != 0) {
      why = str("rows of ", p.ldd, " elements; aux takes multiples of 8");
      return std::nullopt;
    }
    if (p.activation_gradient && p.bias != BiasAlong::none) {
      why = "a bias below the gradient of GELU";
      return std::nullopt;
    }
    bits |= uint32_t{p.activation_gradient ? kEpilogueGeluGradient : kEpilogueGelu};
    if (p.keep_aux) bits |= kEpilogueAux;
    if (p.bias_gradient) bits |= kEpilogueBiasGradient;
  }
  return bits == 0 ? uint32_t{kEpilogueNone} : bits;
}

// One problem in the library's words. Not for two threads at a time.
class Product {
 public:
  Product(std::shared_ptr<Cublaslt> library, const GemmProblem& p, uint32_t epilogue)
      : library_(std::move(library)), problem_(p), epilogue_(epilogue) {
    const Functions& f = library_->functions();
    const bool is_double = p.dtype == DType::f64;
    const bool tf32 = p.dtype == DType::f32 && allow_tf32();
    const ComputeType compute = is_double ? kCompute64F : tf32 ? kComputeFastTF32 : kCompute32F;
    expect(f.MatmulDescCreate(&matmul_, compute, is_double ? kF64 : kF32));
    set_matmul(kTransA, p.trans_b ? kTransposed : kPlain);
    set_matmul(kTransB, p.trans_a ? kTransposed : kPlain);
    set_matmul(kEpilogue, epilogue);
    // The largest axis of the batch is the library's, the others are calls.
    calls_ = p.batch;
    const auto largest = std::ranges::max_element(calls_, {}, &BatchAxis::count);
    BatchAxis own;
    if (largest != calls_.end()) {
      own = *largest;
      calls_.erase(largest);
    }
    for (const BatchAxis& axis : calls_) call_count_ *= axis.count;
    const auto make = [&](DType type, int64_t rows, int64_t columns, int64_t ld, int64_t stride) {
      Layout layout = nullptr;
      expect(f.MatrixLayoutCreate(&layout, data_type(type), static_cast<uint64_t>(rows),
                                  static_cast<uint64_t>(columns), ld));
      layouts_.push_back(layout);
      if (own.count > 1) {
        const auto count = narrow_checked<int32_t>(own.count);
        expect(f.MatrixLayoutSetAttribute(layout, kBatchCount, &count, sizeof(count)));
        expect(f.MatrixLayoutSetAttribute(layout, kBatchStride, &stride, sizeof(stride)));
      }
    };
    make(p.dtype, p.trans_b ? p.k : p.n, p.trans_b ? p.n : p.k, p.ldb, own.b);
    make(p.dtype, p.trans_a ? p.m : p.k, p.trans_a ? p.k : p.m, p.lda, own.a);
    make(p.result_type(), p.n, p.m, p.beta != 0.0 ? p.c_row : p.ldd, p.beta != 0.0 ? own.c : own.d);
    make(p.result_type(), p.n, p.m, p.ldd, own.d);
    if ((epilogue & kEpilogueAux) != 0) {
      set_matmul(kAuxLd, p.ldd);
      if (own.count > 1) set_matmul(kAuxBatchStride, own.d);
    }
  }
  ~Product() {
    const Functions& f = library_->functions();
    for (Layout layout : layouts_) f.MatrixLayoutDestroy(layout);
    f.MatmulDescDestroy(matmul_);
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  // The library's choice for addresses that are multiples of `alignment`; null where it has none.
  const HeuristicResult* choice(int device, uint32_t alignment, size_t workspace,
                                std::string& why) {
    const auto [at, is_new] = choices_.try_emplace({device, alignment});
    if (is_new) at->second = choose(device, alignment, workspace, why);
    return at->second ? &*at->second : nullptr;
  }

  bool run(const GemmOperands& operands, void* workspace, size_t workspace_bytes, void* stream) {
    uintptr_t bits = kAlignment;
    for (const void* address :
         {operands.a, operands.b, operands.c, static_cast<const void*>(operands.d),
          static_cast<const void*>(operands.aux), operands.bias,
          static_cast<const void*>(operands.bias_gradient)}) {
      bits |= reinterpret_cast<uintptr_t>(address);
    }
    for (const BatchAxis& axis : calls_) {
      for (const int64_t stride : {axis.a, axis.b, axis.c, axis.d}) {
        bits |= static_cast<uintptr_t>(stride) * size_of(problem_.dtype);
      }
    }
    const int device = current_device();
    std::string why;
    const HeuristicResult* best =
        choice(device, uint32_t{1} << std::countr_zero(bits), workspace_bytes, why);
    if (best == nullptr) return false;
    if ((epilogue_ & kEpilogueBias) != 0) set_matmul(kBiasPointer, operands.bias);
    if ((epilogue_ & kEpilogueBiasGradient) != 0) set_matmul(kBiasPointer, operands.bias_gradient);
    for (int64_t call = 0; call < call_count_; ++call) {
      if (!multiply(device, *best, operands, offsets_of(call), workspace, workspace_bytes,
                    stream)) {
        check(call == 0, "the library takes all members of a batch or none");
        return false;
      }
    }
    return true;
  }

  int64_t calls() const { return call_count_; }

 private:
  void expect(Status status) const {
    if (status != kSuccess)
      throw DeviceError("describing a product: " + library_->describe(status));
  }
  template <class T>
  void set_matmul(int32_t attribute, const T& value) {
    expect(library_->functions().MatmulDescSetAttribute(matmul_, attribute, &value, sizeof(value)));
  }

  BatchAxis offsets_of(int64_t call) const {
    BatchAxis offsets;
    for (size_t i = calls_.size(); i-- > 0;) {
      const int64_t at = call % calls_[i].count;
      call /= calls_[i].count;
      offsets.a += at * calls_[i].a;
      offsets.b += at * calls_[i].b;
      offsets.c += at * calls_[i].c;
      offsets.d += at * calls_[i].d;
    }
    return offsets;
  }

  std::optional<HeuristicResult> choose(int device, uint32_t alignment, size_t workspace,
                                        std::string& why) {
    const Functions& f = library_->functions();
    Preference preference = nullptr;
    expect(f.MatmulPreferenceCreate(&preference));
    const auto set = [&](int32_t attribute, auto value) {
      expect(f.MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
    };
    set(kMaxWorkspaceBytes, static_cast<uint64_t>(workspace));
    // Parts of a sum are not rounded to 16 bits before they are added.
    if (size_of(problem_.dtype) == 2) set(kReductionSchemeMask, kReduceInComputeType);
    // The library reads how these are aligned from their addresses.
    const auto* example = reinterpret_cast<const void*>(uintptr_t{alignment});
    if ((epilogue_ & (kEpilogueBias | kEpilogueBiasGradient)) != 0)
      set_matmul(kBiasPointer, example);
    if ((epilogue_ & kEpilogueAux) != 0) set_matmul(kAuxPointer, example);
    for (const int32_t operand : {kMinAlignmentA, kMinAlignmentB, kMinAlignmentC, kMinAlignmentD}) {
      set(operand, alignment);
    }
    HeuristicResult result = {};
    int32_t found = 0;
    const Status status =
        f.MatmulAlgoGetHeuristic(library_->handle(device), matmul_, layouts_[0], layouts_[1],
                                 layouts_[2], layouts_[3], preference, 1, &result, &found);
    f.MatmulPreferenceDestroy(preference);
    if (status == kSuccess && found > 0 && result.state == kSuccess) return result;
    why = "cuBLASLt has no algorithm for it: " +
          library_->describe(status != kSuccess ? status : kNotSupported);
    return std::nullopt;
  }

  bool multiply(int device, const HeuristicResult& best, const GemmOperands& operands,
                const BatchAxis& at, void* workspace, size_t workspace_bytes, void* stream) {
    const auto size = static_cast<int64_t>(size_of(problem_.dtype));
    if ((epilogue_ & kEpilogueAux) != 0) {
      void* aux = moved(operands.aux, at.d * size);
      set_matmul(kAuxPointer, aux);
    }
    const auto result_size = static_cast<int64_t>(size_of(problem_.result_type()));
    void* d = moved(operands.d, at.d * result_size);
    const void* c = problem_.beta != 0.0 ? moved(operands.c, at.c * result_size) : d;
    const double factors[2] = {problem_.alpha, problem_.beta};
    const float rounded[2] = {static_cast<float>(problem_.alpha),
                              static_cast<float>(problem_.beta)};
    const bool is_double = problem_.dtype == DType::f64;
    const Status status = library_->functions().Matmul(
        library_->handle(device), matmul_,
        is_double ? static_cast<const void*>(&factors[0]) : &rounded[0],
        moved(operands.b, at.b * size), layouts_[0], moved(operands.a, at.a * size), layouts_[1],
        is_double ? static_cast<const void*>(&factors[1]) : &rounded[1], c, layouts_[2], d,
        layouts_[3], &best.algorithm, workspace, workspace_bytes, stream);
    if (status == kNotSupported) return false;
    if (status != kSuccess) {
      throw DeviceError("a matrix product by cuBLASLt: " + library_->describe(status));
    }
    return true;
  }

  std::shared_ptr<Cublaslt> library_;
  GemmProblem problem_;
  uint32_t epilogue_;
  MatmulDesc matmul_ = nullptr;
  std::vector<Layout> layouts_;   // of B, A, C, D
  std::vector<BatchAxis> calls_;  // one call for each
  int64_t call_count_ = 1;
  std::map<std::pair<int, uint32_t>, std::optional<HeuristicResult>> choices_;
};

// The problem with what is added to the product in D's own layout, put there before.
GemmProblem with_addend_in_d(GemmProblem p) {
  p.beta = p.bias == BiasAlong::rows ? 1.0 : p.beta;
  p.bias = BiasAlong::none;
  p.c_row = p.ldd;
  p.c_column = 1;
  for (BatchAxis& axis : p.batch) axis.c = axis.d;
  return p;
}

// A bias of rows is an addend whose columns are all the same.
GemmProblem with_bias_as_addend(GemmProblem p) {
  p.c_row = 1;
  p.c_column = 0;
  for (BatchAxis& axis : p.batch) axis.c = 0;
  return p;
}

}  // namespace

std::optional<GemmKernel> library_gemm(const GemmProblem& p, std::string& why) {
  if (!kFloatTypes.contains(p.dtype)) {
    why = "it multiplies floats";
    return std::nullopt;
  }
  if (p.k == 0) {
    why = "an empty inner extent";
    return std::nullopt;
  }
  for (const BatchAxis& axis : p.batch) {
    if (!fits<int32_t>(axis.count)) {
      why = str("a batch of ", axis.count, "; it counts in 32 bits");
      return std::nullopt;
    }
  }
  const bool has_addend = p.beta != 0.0;
  const bool of_rows = p.bias == BiasAlong::rows;
  if (of_rows && has_addend) {
    why = "a bias of rows and an addend";
    return std::nullopt;
  }
  const bool direct = !of_rows && (!has_addend || (p.c_column == 1 && p.c_row >= p.n));
  const GemmProblem own = direct ? p : with_addend_in_d(p);
  const std::optional<uint32_t> epilogue = epilogue_of(own, why);
  if (!epilogue) return std::nullopt;
  std::shared_ptr<Cublaslt> library = Cublaslt::find(why);
  if (!library) return std::nullopt;
  auto product = std::make_shared<Product>(library, own, *epilogue);
  if (product->calls() > kMostCalls) {
    why = str("a batch with ", product->calls(), " products of a stride each");
    return std::nullopt;
  }
  const HeuristicResult* best = product->choice(current_device(), kAlignment, kMostWorkspace, why);
  if (best == nullptr) return std::nullopt;
  const size_t bytes = best->workspace_bytes;
  GemmKernel kernel{
      .name = "cublaslt",
      .workspace_bytes = bytes_of<char>(bytes == 0 ? 0 : bytes + kWorkspaceAlignment - 1)};
  kernel.run = [product, direct, bytes, addend = of_rows ? with_bias_as_addend(p) : p,
                mutex = std::make_shared<std::mutex>(),
                of_rows](const GemmOperands& given, void* workspace, void* stream) {
    GemmOperands operands = given;
    if (!direct) {
      if (of_rows) operands.c = operands.bias;
      if (operands.c != operands.d) spread_addend(addend, operands, stream);
      operands.c = operands.d;
    }
    const std::lock_guard lock(*mutex);
    const auto place = (reinterpret_cast<uintptr_t>(workspace) + kWorkspaceAlignment - 1) /
                       kWorkspaceAlignment * kWorkspaceAlignment;
    return product->run(operands, reinterpret_cast<void*>(place), bytes, stream);
  };
  return kernel;
}

}  // namespace ortrain::gpu
