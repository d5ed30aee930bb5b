// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ops/rnn/recurrence.h"
#include "ortrain/runtime/kernel.h"

namespace ortrain::cpu {

// Rows of one cell update that are worth a thread of their own.
inline int64_t row_grain(const Recurrence& r) {
  return std::max<int64_t>(1, 2048 / std::max<int64_t>(1, r.hidden));
}

// out[steps * batch, width] = x * w_ih^T + bias (may be null).
void project_inputs(const Recurrence& r, int64_t width, const float* x, const float* w_ih,
                    const float* bias, float* out);
void project_inputs(const Recurrence& r, int64_t width, const double* x, const double* w_ih,
                    const double* bias, double* out);

// out[batch, width] (+)= h[batch, hidden] * w_hh^T + bias.
void project_state(const Recurrence& r, int64_t width, const float* h, const float* w_hh,
                   const float* bias, bool add, float* out);
void project_state(const Recurrence& r, int64_t width, const double* h, const double* w_hh,
                   const double* bias, bool add, double* out);

// dh[batch, hidden] (+)= dgates[batch, width] * w_hh.
void state_gradient(const Recurrence& r, int64_t width, const float* dgates, const float* w_hh,
                    bool add, float* dh);
void state_gradient(const Recurrence& r, int64_t width, const double* dgates, const double* w_hh,
                    bool add, double* dh);

// The gradients of a whole sequence from those of the gates' inputs; null results are skipped.
// dgates_input reached w_ih, dgates_state reached w_hh (they differ for the GRU only).
template <typename C>
struct SequenceGradients {
  int64_t width;
  const C *x, *h0, *y, *w_ih;
  const C *dgates_input, *dgates_state;
  C *dx, *dw_ih, *dw_hh, *db_ih, *db_hh;
};
void sequence_gradients(const Recurrence& r, const SequenceGradients<float>& g);
void sequence_gradients(const Recurrence& r, const SequenceGradients<double>& g);

// The tensors of a node in the compute type: the arguments themselves, or, for 16-bit types,
// copies in the workspace that `load` fills and `store` writes back. Built while planning.
template <typename T>
class Staging {
 public:
  using C = ComputeType<T>;
  static constexpr bool kCopies = !std::is_same_v<T, C>;

  explicit Staging(const NodeSpec& spec) {
    for (size_t i = 0; i < spec.num_inputs(); ++i) {
      inputs_.push_back(spec.has_input(i) ? slot(spec.input(i).numel(), kCopies) : Slot{});
    }
    for (size_t i = 0; i < spec.num_outputs(); ++i) {
      outputs_.push_back(spec.has_output(i) ? slot(spec.output(i).numel(), kCopies) : Slot{});
    }
  }

  // Gives output `i` memory although nobody wants it, because the computation needs it.
  void require_output(size_t i, int64_t count) {
    if (outputs_.size() <= i) outputs_.resize(i + 1);
    if (!outputs_[i].present) {
      outputs_[i] = slot(count, true);
      outputs_[i].wanted = false;
    }
  }
  // An index for `scratch`.
  size_t add_scratch(int64_t count) {
    scratch_.push_back(slot(count, true));
    return scratch_.size() - 1;
  }
  void request(NodeSpec& spec) const { spec.request_workspace(bytes_of<C>(total_)); }

  const C* input(const KernelArgs& args, size_t i) const {
    if (i >= inputs_.size() || !inputs_[i].present) return nullptr;
    if constexpr (!kCopies) return args.input<C>(i);
    return base(args) + inputs_[i].offset;
  }
  C* output(const KernelArgs& args, size_t i) const {
    if (i >= outputs_.size() || !outputs_[i].present) return nullptr;
    if constexpr (!kCopies) {
      if (outputs_[i].wanted) return args.output<C>(i);
    }
    return base(args) + outputs_[i].offset;
  }
  C* scratch(const KernelArgs& args, size_t i) const { return base(args) + scratch_[i].offset; }

  void load(const KernelArgs& args) const {
    if constexpr (kCopies) {
      for (size_t i = 0; i < inputs_.size(); ++i) {
        if (inputs_[i].present)
          convert(args.input<T>(i), base(args) + inputs_[i].offset, inputs_[i]);
      }
    }
  }
  void store(const KernelArgs& args) const {
    if constexpr (kCopies) {
      for (size_t i = 0; i < outputs_.size(); ++i) {
        if (!outputs_[i].present || !outputs_[i].wanted) continue;
        convert(base(args) + outputs_[i].offset, args.output<T>(i), outputs_[i]);
      }
    }
  }

 private:
  struct Slot {
    bool present = false;
    bool wanted = true;
    int64_t offset = 0;
    int64_t count = 0;
  };

  static C* base(const KernelArgs& args) { return static_cast<C*>(args.workspace); }

  Slot slot(int64_t count, bool takes_memory) {
    Slot result{.present = true, .wanted = true, .offset = total_, .count = count};
    if (takes_memory) total_ += (count + 15) / 16 * 16;
    return result;
  }

  template <typename From, typename To>
  static void convert(const From* from, To* to, const Slot& slot) {
    parallel_for(slot.count, 16384, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = static_cast<To>(from[i]);
    });
  }

  std::vector<Slot> inputs_, outputs_, scratch_;
  int64_t total_ = 0;
};

}  // namespace ortrain::cpu
