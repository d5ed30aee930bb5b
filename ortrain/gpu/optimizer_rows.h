// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "ortrain/base/optimizer_rules.h"
#include "ortrain/gpu/device_code.h"

// What each optimizer does with one element, in float or double. s: its states; s[2] of Adam counts
// where `extended`.
namespace ortrain::gpu {

template <class C>
struct AdamRow {
  using Coefficients = AdamCoefficients;
  static constexpr bool kGradient = true;
  C beta1, gain1, beta2, gain2, epsilon, step_size, root_scale, before, after, l2, factor;

  ORTRAIN_DEVICE explicit AdamRow(const AdamCoefficients& c)
      : beta1(static_cast<C>(c.beta1)),
        gain1(static_cast<C>(1 - c.beta1)),
        beta2(static_cast<C>(c.beta2)),
        gain2(static_cast<C>(1 - c.beta2)),
        epsilon(static_cast<C>(c.epsilon)),
        step_size(static_cast<C>(c.step_size)),
        root_scale(static_cast<C>(c.root_scale)),
        before(static_cast<C>(c.keep_before)),
        after(static_cast<C>(c.keep_after)),
        l2(static_cast<C>(c.l2)),
        factor(static_cast<C>(c.gradient_factor)) {}

  ORTRAIN_DEVICE void operator()(C g, C& p, C* s, bool extended) const {
    g = g * factor + l2 * p;
    s[0] = beta1 * s[0] + gain1 * g;
    s[1] = beta2 * s[1] + gain2 * g * g;
    C square = s[1];
    if (extended) square = s[2] = square > s[2] || square != square ? square : s[2];
    p = after * (before * p - step_size * s[0] / (sqrt(square) * root_scale + epsilon));
  }
};

template <class C>
struct SgdRow {
  using Coefficients = SgdCoefficients;
  static constexpr bool kGradient = true;
  C lr, momentum, keep, gain, l2, factor;
  bool nesterov;

  ORTRAIN_DEVICE explicit SgdRow(const SgdCoefficients& c)
      : lr(static_cast<C>(c.lr)),
        momentum(static_cast<C>(c.momentum)),
        keep(static_cast<C>(c.buffer_keep)),
        gain(static_cast<C>(c.buffer_gain)),
        l2(static_cast<C>(c.l2)),
        factor(static_cast<C>(c.gradient_factor)),
        nesterov(c.nesterov) {}

  // extended: there is a buffer.
  ORTRAIN_DEVICE void operator()(C g, C& p, C* s, bool extended) const {
    g = g * factor + l2 * p;
    if (extended) {
      s[0] = keep * s[0] + gain * g;
      g = nesterov ? g + momentum * s[0] : s[0];
    }
    p -= lr * g;
  }
};

template <class C>
struct AdagradRow {
  using Coefficients = AdagradCoefficients;
  static constexpr bool kGradient = true;
  C lr, epsilon, l2, factor;

  ORTRAIN_DEVICE explicit AdagradRow(const AdagradCoefficients& c)
      : lr(static_cast<C>(c.lr)),
        epsilon(static_cast<C>(c.epsilon)),
        l2(static_cast<C>(c.l2)),
        factor(static_cast<C>(c.gradient_factor)) {}

  ORTRAIN_DEVICE void operator()(C g, C& p, C* s, bool) const {
    g = g * factor + l2 * p;
    s[0] += g * g;
    p -= lr * g / (sqrt(s[0]) + epsilon);
  }
};

template <class C>
struct LambRow {
  using Coefficients = LambCoefficients;
  static constexpr bool kGradient = false;
  C beta1, gain1, beta2, gain2, epsilon, mean_scale, root_scale, decay, factor;
  C rate = 0;  // times the ratio of the norms

  ORTRAIN_DEVICE explicit LambRow(const LambCoefficients& c)
      : beta1(static_cast<C>(c.beta1)),
        gain1(static_cast<C>(1 - c.beta1)),
        beta2(static_cast<C>(c.beta2)),
        gain2(static_cast<C>(1 - c.beta2)),
        epsilon(static_cast<C>(c.epsilon)),
        mean_scale(static_cast<C>(c.mean_scale)),
        root_scale(static_cast<C>(c.root_scale)),
        decay(static_cast<C>(c.weight_decay)),
        factor(static_cast<C>(c.gradient_factor)) {}

  ORTRAIN_DEVICE void moments(C g, C* s) const {
    g *= factor;
    s[0] = beta1 * s[0] + gain1 * g;
    s[1] = beta2 * s[1] + gain2 * g * g;
  }
  ORTRAIN_DEVICE C update(C p, const C* s) const {
    return mean_scale * s[0] / (sqrt(s[1]) * root_scale + epsilon) + decay * p;
  }
  ORTRAIN_DEVICE void operator()(C, C& p, C* s, bool) const { p -= rate * update(p, s); }
};

}  // namespace ortrain::gpu
