// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/device_code.h"

// Matrix units: products of 16 x 16 tiles of float16 or bfloat16 by the lanes of a warp, sums in
// float. Each lane holds some elements of a tile; which ones is another matter on every device, and
// Accumulator tells: row_of(i), column_of(i).
//
//   FragmentA<T> a;  a.load(shared_a, lda);          // a[i][q] = shared_a[i * lda + q]
//   FragmentB<T> b;  b.load_transposed(shared_b, ldb);  // b[q][j] = shared_b[j * ldb + q]
//   Accumulator c;   c.fill(0);
//   multiply_add(c, a, b);                           // c += a b
//   for (int i = 0; i < Accumulator::kElements; ++i) y[c.row_of(i) * n + c.column_of(i)] = c[i];
//
// All lanes of the warp call each function together. Tiles in shared memory are 16-byte aligned,
// leading dimensions multiples of 8 elements; without bank conflicts where ld / 8 is odd.
//
//   CUDA       mma.m16n8k16, twice, for sm_80 and above (PTX ISA, "Warp-level matrix instructions")
//   HIP        v_mfma_f32_16x16x16 of gfx90a
//   simulator  the layout of CUDA, products in shared memory
namespace ortrain::gpu {

#if defined(__HIPCC__)
using Half4 = _Float16 __attribute__((ext_vector_type(4)));
using Short4 = short __attribute__((ext_vector_type(4)));
using Float4 = float __attribute__((ext_vector_type(4)));
#endif

// 16 x 16 sums. A lane has kElements of them, in kRows rows; elements of the same `row_slot` are in
// the same row.
struct Accumulator {
#if defined(__HIPCC__)
  static constexpr int kElements = 4;
  static constexpr int kRows = 4;
  Float4 v;
  ORTRAIN_DEVICE static int row_slot(int i) { return i; }
  ORTRAIN_DEVICE static int row_of_slot(int slot) { return lane() / 16 * 4 + slot; }
  ORTRAIN_DEVICE static int column_of(int) { return lane() % 16; }
#else
  static constexpr int kElements = 8;
  static constexpr int kRows = 2;
  float v[8];
  ORTRAIN_DEVICE static constexpr int row_slot(int i) { return i / 2 % 2; }
  ORTRAIN_DEVICE static int row_of_slot(int slot) { return lane() / 4 + slot * 8; }
  ORTRAIN_DEVICE static int column_of(int i) { return i / 4 * 8 + lane() % 4 * 2 + i % 2; }
#endif
  ORTRAIN_DEVICE static int row_of(int i) { return row_of_slot(row_slot(i)); }

  ORTRAIN_DEVICE float get(int i) const { return v[i]; }
  ORTRAIN_DEVICE void set(int i, float value) { v[i] = value; }
  ORTRAIN_DEVICE float operator[](int i) const { return v[i]; }
  ORTRAIN_DEVICE void fill(float value) {
    ORTRAIN_UNROLL
    for (int i = 0; i < kElements; ++i) v[i] = value;
  }
  // `value` combined over the lanes that hold parts of the same row; all of them get it. With a
  // value per row slot: of the whole row.
  template <class T, class Op>
  ORTRAIN_DEVICE static T reduce_over_row(T value, Op op) {
    ORTRAIN_UNROLL
    for (int mask = (kElements == 4 ? 8 : 2); mask > 0; mask /= 2) {
      value = op(value, exchange_xor(value, mask));
    }
    return value;
  }
};

// T is Float16 or BFloat16. The left factor: row i, inner position q.
template <class T>
struct FragmentA {
  static_assert(sizeof(T) == 2);
#if defined(__HIPCC__)
  Short4 bits;
#elif defined(__CUDACC__)
  uint32_t bits[4];  // two elements along q in each
#else
  T v[8];
#endif
  // From tile[i * ld + q].
  ORTRAIN_DEVICE void load(const T* tile, int ld);
  // From tile[q * ld + i].
  ORTRAIN_DEVICE void load_transposed(const T* tile, int ld);
  // The sums, rounded to T: i is their row, q their column.
  ORTRAIN_DEVICE void from(const Accumulator& sums);
};

// The right factor: inner position q, column j.
template <class T>
struct FragmentB {
  static_assert(sizeof(T) == 2);
#if defined(__HIPCC__)
  Short4 bits;
#elif defined(__CUDACC__)
  uint32_t bits[4];
#else
  T v[8];
#endif
  // From tile[q * ld + j].
  ORTRAIN_DEVICE void load(const T* tile, int ld);
  // From tile[j * ld + q].
  ORTRAIN_DEVICE void load_transposed(const T* tile, int ld);
};

#if defined(__HIPCC__)

// Lane l has row (A) or column (B) l % 16, at inner positions l / 16 * 4 to + 3.
template <class T>
ORTRAIN_DEVICE Short4 four_in_a_row(const T* tile, int ld) {
  return *reinterpret_cast<const Short4*>(tile + lane() % 16 * ld + lane() / 16 * 4);
}
template <class T>
ORTRAIN_DEVICE Short4 four_in_a_column(const T* tile, int ld) {
  const T* first = tile + lane() / 16 * 4 * ld + lane() % 16;
  Short4 bits;
  ORTRAIN_UNROLL
  for (int i = 0; i < 4; ++i) bits[i] = static_cast<short>(first[i * ld].bits);
  return bits;
}

template <class T>
ORTRAIN_DEVICE void FragmentA<T>::load(const T* tile, int ld) {
  bits = four_in_a_row(tile, ld);
}
template <class T>
ORTRAIN_DEVICE void FragmentA<T>::load_transposed(const T* tile, int ld) {
  bits = four_in_a_column(tile, ld);
}
template <class T>
ORTRAIN_DEVICE void FragmentB<T>::load(const T* tile, int ld) {
  bits = four_in_a_column(tile, ld);
}
template <class T>
ORTRAIN_DEVICE void FragmentB<T>::load_transposed(const T* tile, int ld) {
  bits = four_in_a_row(tile, ld);
}

// The sums lie the other way round: a lane has four rows of a column, and needs four columns of a
// row, each of which another lane has.
template <class T>
ORTRAIN_DEVICE void FragmentA<T>::from(const Accumulator& sums) {
  uint32_t pairs[2];
  ORTRAIN_UNROLL
  for (int h = 0; h < 2; ++h) {
    pairs[h] = static_cast<uint32_t>(T(sums[2 * h]).bits) |
               static_cast<uint32_t>(T(sums[2 * h + 1]).bits) << 16;
  }
  const int row = lane() % 16;
  ORTRAIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int source = row / 4 * 16 + lane() / 16 * 4 + i;
    const uint32_t low = broadcast_lane(pairs[0], source);
    const uint32_t high = broadcast_lane(pairs[1], source);
    const uint32_t pair = row % 4 < 2 ? low : high;
    bits[i] = static_cast<short>(row % 2 == 0 ? pair & 0xffffu : pair >> 16);
  }
}

template <class T>
ORTRAIN_DEVICE void multiply_add([[maybe_unused]] Accumulator& c,
                                 [[maybe_unused]] const FragmentA<T>& a,
                                 [[maybe_unused]] const FragmentB<T>& b) {
#if defined(__HIP_DEVICE_COMPILE__)  // the host's pass has no such instructions
  if constexpr (std::is_same_v<T, BFloat16>) {
    c.v = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a.bits, b.bits, c.v, 0, 0, 0);
  } else {
    c.v = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Half4, a.bits),
                                                __builtin_bit_cast(Half4, b.bits), c.v, 0, 0, 0);
  }
#endif
}

#elif defined(__CUDACC__)

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
template <bool kTransposed, class T>
ORTRAIN_DEVICE void load_matrices(uint32_t (&bits)[4], const T* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                 : "r"(address)
                 : "memory");
  }
}

template <class T>
ORTRAIN_DEVICE void FragmentA<T>::load(const T* tile, int ld) {
  load_matrices<false>(bits, tile + lane() % 16 * ld + lane() / 16 * 8);
}
template <class T>
ORTRAIN_DEVICE void FragmentA<T>::load_transposed(const T* tile, int ld) {
  load_matrices<true>(bits, tile + (lane() % 8 + lane() / 16 * 8) * ld + lane() / 8 % 2 * 8);
}
template <class T>
ORTRAIN_DEVICE void FragmentB<T>::load(const T* tile, int ld) {
  load_matrices<true>(bits, tile + lane() % 16 * ld + lane() / 16 * 8);
}
template <class T>
ORTRAIN_DEVICE void FragmentB<T>::load_transposed(const T* tile, int ld) {
  load_matrices<false>(bits, tile + (lane() % 8 + lane() / 16 * 8) * ld + lane() / 8 % 2 * 8);
}

template <class T>
ORTRAIN_DEVICE uint32_t rounded_pair(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

template <class T>
ORTRAIN_DEVICE void FragmentA<T>::from(const Accumulator& sums) {
  ORTRAIN_UNROLL
  for (int i = 0; i < 4; ++i) bits[i] = rounded_pair<T>(sums[2 * i], sums[2 * i + 1]);
}

template <class T>
ORTRAIN_DEVICE void multiply_add(Accumulator& c, const FragmentA<T>& a, const FragmentB<T>& b) {
  ORTRAIN_UNROLL
  for (int h = 0; h < 2; ++h) {
    float* v = c.v + 4 * h;
    if constexpr (std::is_same_v<T, BFloat16>) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
          "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
          : "r"(a.bits[0]), "r"(a.bits[1]), "r"(a.bits[2]), "r"(a.bits[3]), "r"(b.bits[2 * h]),
            "r"(b.bits[2 * h + 1]));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
          "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
          : "r"(a.bits[0]), "r"(a.bits[1]), "r"(a.bits[2]), "r"(a.bits[3]), "r"(b.bits[2 * h]),
            "r"(b.bits[2 * h + 1]));
    }
  }
}

#else

// Element e of a lane's eight is at (outer, inner): the row of A or column of B, and q.
inline int outer_of_a(int e) { return lane() / 4 + e / 2 % 2 * 8; }
inline int inner_of_a(int e) { return lane() % 4 * 2 + e % 2 + e / 4 * 8; }
inline int outer_of_b(int e) { return lane() / 4 + e / 4 * 8; }
inline int inner_of_b(int e) { return lane() % 4 * 2 + e % 2 + e / 2 % 2 * 8; }

template <class T>
void FragmentA<T>::load(const T* tile, int ld) {
  for (int e = 0; e < 8; ++e) v[e] = tile[outer_of_a(e) * ld + inner_of_a(e)];
}
template <class T>
void FragmentA<T>::load_transposed(const T* tile, int ld) {
  for (int e = 0; e < 8; ++e) v[e] = tile[inner_of_a(e) * ld + outer_of_a(e)];
}
template <class T>
void FragmentB<T>::load(const T* tile, int ld) {
  for (int e = 0; e < 8; ++e) v[e] = tile[inner_of_b(e) * ld + outer_of_b(e)];
}
template <class T>
void FragmentB<T>::load_transposed(const T* tile, int ld) {
  for (int e = 0; e < 8; ++e) v[e] = tile[outer_of_b(e) * ld + inner_of_b(e)];
}
template <class T>
void FragmentA<T>::from(const Accumulator& sums) {
  for (int e = 0; e < 8; ++e) v[e] = static_cast<T>(sums[e]);
}

template <class T>
void multiply_add(Accumulator& c, const FragmentA<T>& a, const FragmentB<T>& b) {
  __shared__ float left[32][16][16], right[32][16][16];  // of each warp: [i][q], [j][q]
  for (int e = 0; e < 8; ++e) {
    left[warp()][outer_of_a(e)][inner_of_a(e)] = a.v[e];
    right[warp()][outer_of_b(e)][inner_of_b(e)] = b.v[e];
  }
  warp_barrier();
  for (int i = 0; i < Accumulator::kElements; ++i) {
    const float* row = left[warp()][Accumulator::row_of(i)];
    const float* column = right[warp()][Accumulator::column_of(i)];
    float sum = c.v[i];
    for (int q = 0; q < 16; ++q) sum += row[q] * column[q];
    c.v[i] = sum;
  }
  warp_barrier();
}

#endif

}  // namespace ortrain::gpu
