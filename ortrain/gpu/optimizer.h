// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "ortrain/base/dtype.h"
#include "ortrain/base/optimizer_rules.h"
#include "ortrain/runtime/fault.h"

// The optimizers on many tensors at once, in device memory, as ortrain/cpu/optimizer.h on the host.
// A launch takes the addresses of up to 60 tensors as arguments; nothing waits for the device.
//
// Outside of graphs (FusedAdamW, FusedSGD, FusedLAMB) a binding collects parameters and groups as
// python/src/optimizer.cpp does for the CPU, with `step` as a tensor on the device, gets
// optimizer_workspace() bytes from the caching allocator on the current stream, and calls
// optimizer_step(). It gives back the norm as a view of the device's number, unread: reading it is
// the user's choice. torch.amp.GradScaler hands `grad_scale` and `found_inf` to optimizers whose
// step() takes them (_step_supports_amp_scaling), and waits for nothing then.
namespace ortrain::gpu {

struct OptimizerOperand {
  void* data = nullptr;
  DType dtype = DType::f32;
};

// One parameter of a step: `size` elements in a row of each operand. A float64 parameter has
// float64 operands; all others are computed in float and may mix float32, bfloat16 and float16. The
// states: Adam and LAMB exp_avg, exp_avg_sq, and for AMSGrad max_exp_avg_sq; SGD the momentum
// buffer, or null; Adagrad the sum of squares.
struct OptimizerTensor {
  int64_t size = 0;
  OptimizerOperand param;
  OptimizerOperand grad;  // not written
  std::array<OptimizerOperand, 3> states;
};

enum class OptimizerKind { adam, sgd, adagrad, lamb };

struct OptimizerGroup {
  StepRule rule;
  double sign = 1;  // -1 to maximize
};

struct OptimizerParameter {
  OptimizerTensor tensor;
  int group = 0;
  // The steps made so far on the device, float32 or float64; counts on unless the step is skipped.
  // Null: SGD, which then needs `first`.
  void* step = nullptr;
  bool wide_step = false;
  bool first = false;  // SGD: the buffer is made in this step
};

// What all parameters of a step share; addresses are on the device.
struct OptimizerScaling {
  double gradient_factor = 1;
  const float* grad_scale = nullptr;  // gradients are divided by it
  const float* found_inf = nullptr;   // not 0: nothing changes
  const Fault* fault = nullptr;       // nothing changes while one is recorded either
  std::optional<double> max_norm = std::nullopt;
  // With max_norm: gets the norm of the gradients times gradient_factor / grad_scale; may be null.
  double* norm = nullptr;
};

// Scratch memory on the device for one step, 16-byte aligned.
size_t optimizer_workspace(std::span<const OptimizerParameter> parameters);
// One step of all parameters, on the stream. The workspace is free again behind it.
void optimizer_step(OptimizerKind kind, std::span<const OptimizerParameter> parameters,
                    std::span<const OptimizerGroup> groups, const OptimizerScaling& scaling,
                    void* workspace, void* stream);

// --- the parts, for the operators of graphs

// Coefficients on the device: of each tensor, or one for all of them.
template <class Coefficients>
struct CoefficientList {
  const Coefficients* values = nullptr;
  bool one_for_all = true;
};

// `skip`: a byte on the device that is not 0 where nothing is to change; may be null.
void adam_step(std::span<const OptimizerTensor> tensors, CoefficientList<AdamCoefficients> c,
               const uint8_t* skip, void* stream);
void sgd_step(std::span<const OptimizerTensor> tensors, CoefficientList<SgdCoefficients> c,
              const uint8_t* skip, void* stream);
void adagrad_step(std::span<const OptimizerTensor> tensors, CoefficientList<AdagradCoefficients> c,
                  const uint8_t* skip, void* stream);

// Doubles of scratch memory for norms: one per piece of a tensor, and as many again for LAMB.
int64_t norm_pieces(std::span<const OptimizerTensor> tensors);
// Moves the states; one entry of `norms` per tensor, zeros with `skip`.
void lamb_moments(std::span<const OptimizerTensor> tensors, CoefficientList<LambCoefficients> c,
                  const uint8_t* skip, double* pieces, LambNorms* norms, void* stream);
// Moves the parameters. Needs no gradients.
void lamb_update(std::span<const OptimizerTensor> tensors, CoefficientList<LambCoefficients> c,
                 const uint8_t* skip, const LambNorms* norms, void* stream);
// The 2-norm of all gradients together, added up in double, in an order that sizes alone decide.
void gradient_norm(std::span<const OptimizerTensor> tensors, double* pieces, double* norm,
                   void* stream);

}  // namespace ortrain::gpu
