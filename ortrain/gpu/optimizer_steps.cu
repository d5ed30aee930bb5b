// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/optimizer.h"
#include "ortrain/gpu/optimizer_rows.h"
#include "ortrain/gpu/reduce.h"
#include "ortrain/gpu/words.h"

namespace ortrain::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPiece = 8192;  // elements of a block
constexpr int kOperands = 5;      // parameter, gradient, states

enum class Format : uint8_t { f32, bf16, f16 };

struct StepTensor {
  void* data[kOperands] = {};
  int64_t size = 0;
  uint32_t first_block = 0;
  uint32_t index = 0;              // in the list of the caller
  Format formats[kOperands] = {};  // nothing for float64
  bool vectors = false;            // all addresses are aligned for them
};
constexpr int kTensors = 60;  // arguments of a kernel may take 4 KiB
struct Chunk {
  DeviceArray<StepTensor, kTensors> tensors;
  int count = 0;
  uint32_t blocks = 0;
};
static_assert(sizeof(Chunk) <= 4000);

// Elements that a thread takes at a time: 16 bytes in the type of the computation.
template <class C>
inline constexpr int kAtOnce = 16 / static_cast<int>(sizeof(C));

template <class T, class C>
ORTRAIN_DEVICE void read_as(const void* data, int64_t at, int count, C* values) {
  const T* from = static_cast<const T*>(data) + at;
  if (count == kAtOnce<C>) {
    const Vector<T, kAtOnce<C>> vector = load_vector<kAtOnce<C>>(from);
    for (int k = 0; k < kAtOnce<C>; ++k) values[k] = static_cast<C>(vector[k]);
  } else {
    for (int k = 0; k < kAtOnce<C>; ++k) values[k] = k < count ? static_cast<C>(from[k]) : C{0};
  }
}
template <class T, class C>
ORTRAIN_DEVICE void write_as(void* data, int64_t at, int count, const C* values) {
  T* to = static_cast<T*>(data) + at;
  if (count == kAtOnce<C>) {
    Vector<T, kAtOnce<C>> vector = {};
    for (int k = 0; k < kAtOnce<C>; ++k) vector[k] = static_cast<T>(values[k]);
    store_vector<kAtOnce<C>>(to, vector);
  } else {
    // Indices known to the compiler: the values stay in registers.
    for (int k = 0; k < kAtOnce<C>; ++k) {
      if (k < count) to[k] = static_cast<T>(values[k]);
    }
  }
}

// The format is the same in the whole block.
template <class C>
ORTRAIN_DEVICE void read(const StepTensor& t, int operand, int64_t at, int count, C* values) {
  if constexpr (sizeof(C) == 8) {
    read_as<double>(t.data[operand], at, count, values);
  } else if (t.formats[operand] == Format::f32) {
    read_as<float>(t.data[operand], at, count, values);
  } else if (t.formats[operand] == Format::bf16) {
    read_as<BFloat16>(t.data[operand], at, count, values);
  } else {
    read_as<Float16>(t.data[operand], at, count, values);
  }
}
template <class C>
ORTRAIN_DEVICE void write(const StepTensor& t, int operand, int64_t at, int count,
                          const C* values) {
  if constexpr (sizeof(C) == 8) {
    write_as<double>(t.data[operand], at, count, values);
  } else if (t.formats[operand] == Format::f32) {
    write_as<float>(t.data[operand], at, count, values);
  } else if (t.formats[operand] == Format::bf16) {
    write_as<BFloat16>(t.data[operand], at, count, values);
  } else {
    write_as<Float16>(t.data[operand], at, count, values);
  }
}

// body(first element, how many) for each run of a thread. Without alignment they are single
// elements, written as runs of less than a vector.
template <class C, class Body>
ORTRAIN_DEVICE void for_runs(const StepTensor& t, const Body& body) {
  const int64_t begin = int64_t{blockIdx.x - t.first_block} * kPiece;
  const int64_t end = begin + kPiece < t.size ? begin + kPiece : t.size;
  const int width = t.vectors ? kAtOnce<C> : 1;
  for (int64_t i = begin + int64_t{threadIdx.x} * width; i < end; i += kThreads * width) {
    body(i, static_cast<int>(end - i < width ? end - i : width));
  }
}

template <class Row, class C>
__global__ void __launch_bounds__(kThreads)
    step_tensors(Chunk chunk, CoefficientList<typename Row::Coefficients> coefficients,
                 const LambNorms* norms, const uint8_t* skip) {
  if (skip != nullptr && *skip != 0) return;
  const StepTensor& t = of_this_block(chunk.tensors, chunk.count);
  const auto& c = coefficients.values[coefficients.one_for_all ? 0 : t.index];
  Row row(c);
  if constexpr (!Row::kGradient) row.rate = static_cast<C>(c.lr * lamb_ratio(norms[t.index], c));
  constexpr int kN = kAtOnce<C>;
  const bool has[3] = {t.data[2] != nullptr, t.data[3] != nullptr, t.data[4] != nullptr};
  constexpr bool kSgd = std::is_same_v<typename Row::Coefficients, SgdCoefficients>;
  const bool extended = kSgd ? has[0] : has[2];
  for_runs<C>(t, [&](int64_t i, int count) {
    C g[kN] = {}, p[kN] = {}, s[3][kN] = {};
    read(t, 0, i, count, p);
    if (Row::kGradient) read(t, 1, i, count, g);
    for (int k = 0; k < 3; ++k) {
      if (has[k]) read(t, 2 + k, i, count, s[k]);
    }
    for (int k = 0; k < kN; ++k) {
      C of_element[3] = {s[0][k], s[1][k], s[2][k]};
      row(g[k], p[k], of_element, extended);
      for (int j = 0; j < 3; ++j) s[j][k] = of_element[j];
    }
    write(t, 0, i, count, p);
    for (int k = 0; k < 3; ++k) {
      if (Row::kGradient && has[k]) write(t, 2 + k, i, count, s[k]);
    }
  });
}

// Each block leaves the sums of squares of its piece: of the parameter, then of the update.
template <class C>
__global__ void __launch_bounds__(kThreads)
    lamb_pieces(Chunk chunk, CoefficientList<LambCoefficients> coefficients, const uint8_t* skip,
                double* pieces) {
  if (skip != nullptr && *skip != 0) return;
  const StepTensor& t = of_this_block(chunk.tensors, chunk.count);
  const LambRow<C> row(coefficients.values[coefficients.one_for_all ? 0 : t.index]);
  constexpr int kN = kAtOnce<C>;
  double param = 0, update = 0;
  for_runs<C>(t, [&](int64_t i, int count) {
    C g[kN], p[kN], m[kN], v[kN];
    read(t, 0, i, count, p);
    read(t, 1, i, count, g);
    read(t, 2, i, count, m);
    read(t, 3, i, count, v);
    for (int k = 0; k < kN; ++k) {
      if (k >= count) continue;
      C s[2] = {m[k], v[k]};
      row.moments(g[k], s);
      m[k] = s[0];
      v[k] = s[1];
      const double u = row.update(p[k], s);
      param += static_cast<double>(p[k]) * static_cast<double>(p[k]);
      update += u * u;
    }
    write(t, 2, i, count, m);
    write(t, 3, i, count, v);
  });
  param = block_sum(param);
  update = block_sum(update);
  if (threadIdx.x != 0) return;
  pieces[2 * blockIdx.x] = param;
  pieces[2 * blockIdx.x + 1] = update;
}

// A block adds up the pieces of one tensor.
__global__ void __launch_bounds__(kThreads)
    add_norms(Chunk chunk, const uint8_t* skip, const double* pieces, LambNorms* norms) {
  const StepTensor& t = chunk.tensors[static_cast<int>(blockIdx.x)];
  const bool skipped = skip != nullptr && *skip != 0;
  const uint32_t end = static_cast<int>(blockIdx.x) + 1 < chunk.count
                           ? chunk.tensors[static_cast<int>(blockIdx.x) + 1].first_block
                           : chunk.blocks;
  double param = 0, update = 0;
  if (!skipped) {
    for (uint32_t i = t.first_block + threadIdx.x; i < end; i += kThreads) {
      param += pieces[2 * i];
      update += pieces[2 * i + 1];
    }
  }
  param = block_sum(param);
  update = block_sum(update);
  if (threadIdx.x == 0) norms[t.index] = {param, update};
}

template <class C>
__global__ void __launch_bounds__(kThreads) square_gradients(Chunk chunk, double* pieces) {
  const StepTensor& t = of_this_block(chunk.tensors, chunk.count);
  double sum = 0;
  for_runs<C>(t, [&](int64_t i, int count) {
    C g[kAtOnce<C>];
    read(t, 1, i, count, g);
    // Behind the end they are zero.
    for (int k = 0; k < kAtOnce<C>; ++k) {
      sum += static_cast<double>(g[k]) * static_cast<double>(g[k]);
    }
  });
  sum = block_sum(sum);
  if (threadIdx.x == 0) pieces[blockIdx.x] = sum;
}

__global__ void root_of_sum(int64_t count, const double* pieces, double* norm) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += pieces[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *norm = sqrt(sum);
}

int64_t pieces_of(int64_t size) { return (size + kPiece - 1) / kPiece; }

Format format_of(DType dtype) {
  return dtype == DType::bf16 ? Format::bf16 : dtype == DType::f16 ? Format::f16 : Format::f32;
}

bool is_wide(const OptimizerTensor& tensor) {
  return (tensor.param.data != nullptr ? tensor.param : tensor.grad).dtype == DType::f64;
}

// body(chunk, tag of float or double, number of pieces before it). `keeps_empty`: tensors without
// elements are there too.
template <class Body>
void for_chunks(std::span<const OptimizerTensor> tensors, bool keeps_empty, const Body& body) {
  int64_t before = 0;
  for (const bool wide : {false, true}) {
    Chunk chunk;
    const auto flush = [&] {
      if (chunk.count == 0) return;
      if (wide) {
        body(chunk, double{}, before);
      } else {
        body(chunk, float{}, before);
      }
      before += chunk.blocks;
      chunk.count = 0;
      chunk.blocks = 0;
    };
    for (size_t i = 0; i < tensors.size(); ++i) {
      const OptimizerTensor& tensor = tensors[i];
      if (is_wide(tensor) != wide || (tensor.size == 0 && !keeps_empty)) continue;
      const int64_t needed = pieces_of(tensor.size);
      check(needed < int64_t{1} << 30, "a tensor has less than 2^43 elements");
      if (chunk.count == kTensors || int64_t{chunk.blocks} + needed >= int64_t{1} << 31) flush();
      StepTensor& entry = chunk.tensors[chunk.count++];
      entry = {};
      const OptimizerOperand* operands[kOperands] = {&tensor.param, &tensor.grad, &tensor.states[0],
                                                     &tensor.states[1], &tensor.states[2]};
      entry.vectors = true;
      for (int k = 0; k < kOperands; ++k) {
        entry.data[k] = operands[k]->data;
        entry.formats[k] = format_of(operands[k]->dtype);
        const int vector =
            wide ? 16 : static_cast<int>(size_of(operands[k]->dtype)) * kAtOnce<float>;
        if (operands[k]->data != nullptr && word_of_address(operands[k]->data, vector) < vector) {
          entry.vectors = false;
        }
      }
      entry.size = tensor.size;
      entry.first_block = chunk.blocks;
      entry.index = static_cast<uint32_t>(i);
      chunk.blocks += static_cast<uint32_t>(needed);
    }
    flush();
  }
}

template <template <class> class Row, class Coefficients>
void run_step(std::span<const OptimizerTensor> tensors, CoefficientList<Coefficients> c,
              const LambNorms* norms, const uint8_t* skip, void* stream) {
  for_chunks(tensors, false, [&](const Chunk& chunk, auto tag, int64_t) {
    using C = decltype(tag);
    launch(step_tensors<Row<C>, C>, {.blocks = chunk.blocks, .threads = kThreads}, stream, chunk, c,
           norms, skip);
  });
}

}  // namespace

void adam_step(std::span<const OptimizerTensor> tensors, CoefficientList<AdamCoefficients> c,
               const uint8_t* skip, void* stream) {
  run_step<AdamRow>(tensors, c, nullptr, skip, stream);
}
void sgd_step(std::span<const OptimizerTensor> tensors, CoefficientList<SgdCoefficients> c,
              const uint8_t* skip, void* stream) {
  run_step<SgdRow>(tensors, c, nullptr, skip, stream);
}
void adagrad_step(std::span<const OptimizerTensor> tensors, CoefficientList<AdagradCoefficients> c,
                  const uint8_t* skip, void* stream) {
  run_step<AdagradRow>(tensors, c, nullptr, skip, stream);
}

int64_t norm_pieces(std::span<const OptimizerTensor> tensors) {
  int64_t pieces = 0;
  for (const OptimizerTensor& tensor : tensors) pieces += pieces_of(tensor.size);
  return pieces;
}

void lamb_moments(std::span<const OptimizerTensor> tensors, CoefficientList<LambCoefficients> c,
                  const uint8_t* skip, double* pieces, LambNorms* norms, void* stream) {
  for_chunks(tensors, true, [&](const Chunk& chunk, auto tag, int64_t before) {
    launch(lamb_pieces<decltype(tag)>, {.blocks = chunk.blocks, .threads = kThreads}, stream, chunk,
           c, skip, pieces + 2 * before);
    launch(add_norms, {.blocks = block_count(chunk.count), .threads = kThreads}, stream, chunk,
           skip, pieces + 2 * before, norms);
  });
}

void lamb_update(std::span<const OptimizerTensor> tensors, CoefficientList<LambCoefficients> c,
                 const uint8_t* skip, const LambNorms* norms, void* stream) {
  run_step<LambRow>(tensors, c, norms, skip, stream);
}

void gradient_norm(std::span<const OptimizerTensor> tensors, double* pieces, double* norm,
                   void* stream) {
  for_chunks(tensors, false, [&](const Chunk& chunk, auto tag, int64_t before) {
    launch(square_gradients<decltype(tag)>, {.blocks = chunk.blocks, .threads = kThreads}, stream,
           chunk, pieces + before);
  });
  launch(root_of_sum, {.blocks = 1, .threads = 1024}, stream, norm_pieces(tensors), pieces, norm);
}

}  // namespace ortrain::gpu
