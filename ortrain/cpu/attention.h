// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "ortrain/base/philox.h"
#include "ortrain/cpu/storage.h"

namespace ortrain::cpu {

// Scaled dot-product attention without the [queries, keys] matrix:
//   out = dropout(softmax(scale q k^T + mask)) v, per batch entry and head.
// Query head h reads key and value head h / (heads / kv_heads). The results do not depend on the
// number of threads.
struct AttentionShape {
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
};

// Distances in elements; the elements of one head's row are contiguous. Covers [b, h, s, d] and
// [b, s, h, d].
struct AttentionStrides {
  int64_t batch, head, row;
};

// What is added to the scores: floats of the type of q, or booleans (false = minus infinity).
// A stride of 0 repeats.
struct AttentionMask {
  enum class Kind { kNone, kBool, kFloat };
  Kind kind = Kind::kNone;
  const void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, col = 0;
};

struct AttentionOptions {
  double scale = 1.0;
  bool causal = false;  // key j is seen by query i >= j
  // What is drawn: see AttentionRowIndex and ortrain/base/philox.h.
  double dropout = 0.0;
  uint64_t seed = 0, stream = 0;
};

// Where the rows of queries stand among all rows, for logsumexp and for the numbers that dropout
// draws: row i of head h of batch entry b is row b batch + h head + first + i, whose keys, counted
// from the first one of its sequence, draw from as many blocks as `keys` take, the same for all.
struct AttentionRowIndex {
  int64_t batch, head, keys, first = 0;
  int64_t of(int64_t b, int64_t h, int64_t i) const { return b * batch + h * head + first + i; }
  int64_t draw(int64_t row, int64_t j) const {
    return row * blocks_of_row(keys) * kHalvesOfBlock + j;
  }
};

struct AttentionForward {
  AttentionShape shape;
  AttentionOptions options;
  Storage storage;  // of q, k, v, out and a float mask
  const void* q;
  const void* k;
  const void* v;
  AttentionStrides q_strides, k_strides, v_strides;
  AttentionMask mask;
  void* out;
  AttentionStrides out_strides;
  AttentionRowIndex rows;
  // [batch, heads, queries] log of the sum of exp(scores), float (double for kF64); may be null. A
  // query that sees no key has an output of zeros and +inf here, which makes its gradients zero.
  void* logsumexp;
};

// Whether a logsumexp is so large that its rounding hides what is added to the highest score, the
// log of how many keys share it: where a mask moves all scores of a query far down, by the least
// number of a type, say. Probabilities are then divided by their own sum once more.
template <class T>
bool hides_sum(T logsumexp) {
  constexpr T kFar = sizeof(T) == 4 ? T(0x1p12) : T(0x1p41);  // off by 2^-12 at most below it
  return std::isfinite(logsumexp) && std::abs(logsumexp) >= kFar;
}

struct AttentionBackward {
  AttentionForward forward;  // as it ran; out and logsumexp are read
  const void* dout;
  AttentionStrides dout_strides;
  // Any of them may be null. Layouts of q, k, v in `forward`, except for these strides.
  void* dq;
  void* dk;
  void* dv;
  AttentionStrides dq_strides, dk_strides, dv_strides;
  // Gradient of a float mask, summed over what the mask repeats; float (double for kF64), with the
  // strides of the mask; null if not wanted. `mask_size` elements.
  void* dmask;
  int64_t mask_size;
  // attention_backward_workspace() bytes.
  void* workspace;
};

// Straight loops in double: the definition. Any storage.
void attention_reference(const AttentionForward& attention);
void attention_reference(const AttentionBackward& attention);

// Blocks of queries and keys in cache: an online softmax forward (Milakov and Gimelshein 2018), the
// probabilities recomputed from logsumexp backward (Dao et al. 2022). kF32, kBF16, kF16 with float
// arithmetic.
void attention_blocked(const AttentionForward& attention);
void attention_blocked(const AttentionBackward& attention);
int64_t attention_backward_workspace(const AttentionShape& shape, const AttentionMask& mask,
                                     bool wants_dmask);

// The rows of several sequences, one sequence after the other in one batch entry without a mask:
// sequence n has the rows [offsets[n], offsets[n + 1]) and sees its own keys alone. Rows behind the
// last sequence repeat row 0 (zeros where there is no sequence) and have no gradient. `offsets`,
// count + 1 of them, must not fall; they begin at 0 and end at no more than `shape.queries`. No
// workspace is needed.
struct AttentionSequences {
  const int64_t* offsets;
  int64_t count;
};
// Throws IndexError if the offsets are not as said above.
void check_sequences(const AttentionSequences& sequences, int64_t rows);
// The problem of sequence n; its gradients likewise.
AttentionForward sequence_of(const AttentionForward& all, const AttentionSequences& s, int64_t n);
AttentionBackward sequence_of(const AttentionBackward& all, const AttentionSequences& s, int64_t n);
// The results of the rows behind the last sequence; forward, once row 0 is there.
void fill_rest(const AttentionForward& all, const AttentionSequences& sequences);
void clear_rest(const AttentionBackward& all, const AttentionSequences& sequences);

void attention_blocked(const AttentionForward& attention, const AttentionSequences& sequences);
void attention_blocked(const AttentionBackward& attention, const AttentionSequences& sequences);

}  // namespace ortrain::cpu
