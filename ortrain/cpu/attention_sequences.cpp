// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <limits>

#include "ortrain/base/error.h"
#include "ortrain/cpu/attention.h"

namespace ortrain::cpu {
namespace {

const void* at_row(const void* base, Storage storage, const AttentionStrides& s, int64_t row) {
  return base == nullptr ? nullptr
                         : static_cast<const char*>(base) + row * s.row * storage_size(storage);
}

void* at_row(void* base, Storage storage, const AttentionStrides& s, int64_t row) {
  return const_cast<void*>(at_row(static_cast<const void*>(base), storage, s, row));
}

// Rows [begin, end) of all heads; they are contiguous in every layout that one batch entry of
// packed rows has.
void clear_rows(void* base, Storage storage, const AttentionStrides& s, int64_t begin,
                int64_t end) {
  if (base == nullptr || begin >= end) return;
  std::memset(at_row(base, storage, s, begin), 0,
              static_cast<size_t>((end - begin) * s.row * storage_size(storage)));
}

template <class T>
void set_infinite(void* logsumexp, const AttentionForward& a, int64_t begin) {
  for (int64_t h = 0; h < a.shape.heads; ++h) {
    T* row = static_cast<T*>(logsumexp) + a.rows.of(0, h, 0);
    std::fill(row + begin, row + a.shape.queries, std::numeric_limits<T>::infinity());
  }
}

}  // namespace

void check_sequences(const AttentionSequences& sequences, int64_t rows) {
  int64_t before = 0;
  for (int64_t n = 0; n <= sequences.count; ++n) {
    const int64_t offset = sequences.offsets[n];
    if (offset < before || offset > rows || (n == 0 && offset != 0)) {
      throw IndexError(str("'offsets' has ", offset, " at ", n, ", expected a value in [", before,
                           ", ", n == 0 ? 0 : rows, "]"));
    }
    before = offset;
  }
}

AttentionForward sequence_of(const AttentionForward& all, const AttentionSequences& s, int64_t n) {
  const int64_t begin = s.offsets[n];
  AttentionForward one = all;
  one.shape.queries = one.shape.keys = s.offsets[n + 1] - begin;
  one.q = at_row(all.q, all.storage, all.q_strides, begin);
  one.k = at_row(all.k, all.storage, all.k_strides, begin);
  one.v = at_row(all.v, all.storage, all.v_strides, begin);
  one.out = at_row(all.out, all.storage, all.out_strides, begin);
  one.rows.first += begin;
  return one;
}

AttentionBackward sequence_of(const AttentionBackward& all, const AttentionSequences& s,
                              int64_t n) {
  const int64_t begin = s.offsets[n];
  const Storage storage = all.forward.storage;
  AttentionBackward one = all;
  one.forward = sequence_of(all.forward, s, n);
  one.dout = at_row(all.dout, storage, all.dout_strides, begin);
  one.dq = at_row(all.dq, storage, all.dq_strides, begin);
  one.dk = at_row(all.dk, storage, all.dk_strides, begin);
  one.dv = at_row(all.dv, storage, all.dv_strides, begin);
  return one;
}

void fill_rest(const AttentionForward& all, const AttentionSequences& sequences) {
  const int64_t end = sequences.offsets[sequences.count];
  const int64_t bytes = all.out_strides.row * storage_size(all.storage);
  if (end == 0) {
    clear_rows(all.out, all.storage, all.out_strides, 0, all.shape.queries);
  } else {
    for (int64_t row = end; row < all.shape.queries; ++row) {
      std::memcpy(at_row(all.out, all.storage, all.out_strides, row), all.out,
                  static_cast<size_t>(bytes));
    }
  }
  if (all.logsumexp == nullptr) return;
  if (all.storage == Storage::kF64) {
    set_infinite<double>(all.logsumexp, all, end);
  } else {
    set_infinite<float>(all.logsumexp, all, end);
  }
}

void clear_rest(const AttentionBackward& all, const AttentionSequences& sequences) {
  const int64_t end = sequences.offsets[sequences.count];
  const int64_t rows = all.forward.shape.queries;
  clear_rows(all.dq, all.forward.storage, all.dq_strides, end, rows);
  clear_rows(all.dk, all.forward.storage, all.dk_strides, end, rows);
  clear_rows(all.dv, all.forward.storage, all.dv_strides, end, rows);
}

}  // namespace ortrain::cpu
