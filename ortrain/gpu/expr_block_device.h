// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What generated kernels need besides scalar operations: storage types, vectors in memory, division
// by numbers that are known at the launch, reductions over the threads of a row. Behind the text of
// expr_scalar_device.h in every generated kernel; see expr_source.h.

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__)
#define ORTRAIN_EXPR_UNROLL _Pragma("unroll")
#else
#define ORTRAIN_EXPR_UNROLL
#endif

#if defined(__HIPCC__) || defined(__HIPCC_RTC__)
#define ORTRAIN_EXPR_WARP 64
#define ORTRAIN_EXPR_EXCHANGE(value, mask) __shfl_xor(value, mask)
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define ORTRAIN_EXPR_WARP 32
#define ORTRAIN_EXPR_EXCHANGE(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#else
#define ORTRAIN_EXPR_WARP 32
#define ORTRAIN_EXPR_EXCHANGE(value, mask) ortrain_host_exchange(value, mask)
#endif

namespace ortrain::gpu::scalar {

// --- arguments of a kernel: sizes, strides and addresses

template <int N>
struct Arguments {
  U64 words[N];
};

// Reports into ortrain::Fault (runtime/fault.h): kind, step, value, position, low, high.
struct DivisionFaults {
  int* slot;
  U32 step;

  ORTRAIN_EXPR_FUNCTION void division() const {
    constexpr int kBeingWritten = -1, kNone = 0, kDivision = 4;
    if (slot == nullptr) return;
#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__)
    if (atomicCAS(slot, kNone, kBeingWritten) != kNone) return;
    slot[1] = static_cast<int>(step);
    __threadfence_system();
#else
    if (!__sync_bool_compare_and_swap(slot, kNone, kBeingWritten)) return;
    slot[1] = static_cast<int>(step);
    __sync_synchronize();
#endif
    *static_cast<volatile int*>(slot) = kDivision;
  }
};

// n / divisor for n < 2^31, by a multiplication: Granlund and Montgomery, "Division by invariant
// integers using multiplication" (PLDI 1994). `packed` is from pack_divisor in
// expr_kernel_plan.cpp.
struct Divider {
  U32 divisor, magic, shift;

  ORTRAIN_EXPR_FUNCTION U32 quotient(U32 n) const {
    return (static_cast<U32>((static_cast<U64>(n) * magic) >> 32) + n) >> shift;
  }
};
struct WideDivider {
  U64 divisor;

  ORTRAIN_EXPR_FUNCTION U64 quotient(U64 n) const { return n / divisor; }
};

// --- values in memory

struct BFloat {
  unsigned short bits;
};
struct Half {
  unsigned short bits;
};
struct Boolean {
  unsigned char byte;
};

template <class T>
ORTRAIN_EXPR_FUNCTION T widen(T value) {
  return value;
}
ORTRAIN_EXPR_FUNCTION float widen(BFloat value) { return float_of_bf16(value.bits); }
ORTRAIN_EXPR_FUNCTION float widen(Half value) { return float_of_f16(value.bits); }
ORTRAIN_EXPR_FUNCTION bool widen(Boolean value) { return value.byte != 0; }

template <class Storage, class T>
ORTRAIN_EXPR_FUNCTION Storage narrow(T value) {
  if constexpr (SameType<Storage, BFloat>::value) {
    return {bf16_bits(value)};
  } else if constexpr (SameType<Storage, Half>::value) {
    return {f16_bits(value)};
  } else if constexpr (SameType<Storage, Boolean>::value) {
    return {static_cast<unsigned char>(value ? 1 : 0)};
  } else {
    return value;
  }
}

// What one access moves: 16 bytes at most, so a longer vector takes several.
template <class T, int V>
struct alignas(V * sizeof(T) < 16 ? V * sizeof(T) : 16) Vector {
  T values[V];
};
template <int V, class T>
ORTRAIN_EXPR_FUNCTION Vector<T, V> load(const T* address) {
  return *reinterpret_cast<const Vector<T, V>*>(address);
}
template <class T, int V>
ORTRAIN_EXPR_FUNCTION void store(T* address, const Vector<T, V>& vector) {
  *reinterpret_cast<Vector<T, V>*>(address) = vector;
}

template <int V>
struct Width {
  static constexpr int value = V;
};

// The random words of elements first .. first + V - 1; `first` is a multiple of V.
template <int V>
struct RandomWords {
  U32 values[V];

  ORTRAIN_EXPR_FUNCTION RandomWords(U64 seed, U64 stream, U64 first) {
    if constexpr (V >= 4) {
      for (int i = 0; i < V / 4; ++i) {
        const PhiloxBlock block = philox_words(seed, stream, first / 4 + i);
        for (int k = 0; k < 4; ++k) values[4 * i + k] = block.words[k];
      }
    } else if constexpr (V == 2) {
      const PhiloxBlock block = philox_words(seed, stream, first / 4);
      values[0] = (first & 2) != 0 ? block.words[2] : block.words[0];
      values[1] = (first & 2) != 0 ? block.words[3] : block.words[1];
    } else {
      values[0] = philox_element(seed, stream, first);
    }
  }
};

// --- reductions over a warp or a block; all threads take part and get the result

struct SumOf {
  template <class T>
  ORTRAIN_EXPR_FUNCTION T operator()(T a, T b) const {
    return op_add(a, b);
  }
};
struct MaxOf {
  template <class T>
  ORTRAIN_EXPR_FUNCTION T operator()(T a, T b) const {
    return op_max(a, b);
  }
};
struct MinOf {
  template <class T>
  ORTRAIN_EXPR_FUNCTION T operator()(T a, T b) const {
    return op_min(a, b);
  }
};

template <class T, class Op>
ORTRAIN_EXPR_FUNCTION T reduce_warp(T value, Op op) {
  for (int mask = ORTRAIN_EXPR_WARP / 2; mask > 0; mask /= 2) {
    if constexpr (sizeof(T) < 4) {
      value = op(value, static_cast<T>(ORTRAIN_EXPR_EXCHANGE(static_cast<int>(value), mask)));
    } else {
      value = op(value, ORTRAIN_EXPR_EXCHANGE(value, mask));
    }
  }
  return value;
}

// `none` changes nothing. May be called again at once. A block has 1024 threads at most.
template <class T, class Op>
ORTRAIN_EXPR_FUNCTION T reduce_block(T value, T none, Op op) {
  __shared__ T partial[1024 / ORTRAIN_EXPR_WARP];
  const int lane = static_cast<int>(threadIdx.x) % ORTRAIN_EXPR_WARP;
  const int warps = static_cast<int>(blockDim.x) / ORTRAIN_EXPR_WARP;
  value = reduce_warp(value, op);
  if (lane == 0) partial[threadIdx.x / ORTRAIN_EXPR_WARP] = value;
  __syncthreads();
  value = reduce_warp(lane < warps ? partial[lane] : none, op);
  __syncthreads();
  return value;
}

}  // namespace ortrain::gpu::scalar
