// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ops/conv/conv_kernels.h"

namespace ortrain::cpu {
namespace {

using ops::ConvProblem;
using ops::WindowAxis;

template <typename T>
double window_sum(const ConvProblem& p, const T* x, const T* w, int64_t od, int64_t oh,
                  int64_t ow) {
  const WindowAxis &d = p.axes[0], &h = p.axes[1], &v = p.axes[2];
  const int64_t begin = v.k_begin(ow), end = v.k_end(ow);
  double sum = 0;
  for (int64_t c = 0; c < p.group_in(); ++c, x += p.in_size(), w += p.kernel_size()) {
    for (int64_t kd = d.k_begin(od); kd < d.k_end(od); ++kd) {
      for (int64_t kh = h.k_begin(oh); kh < h.k_end(oh); ++kh) {
        const T* row =
            x + ((d.start(od) + kd * d.dilation) * h.in + h.start(oh) + kh * h.dilation) * v.in +
            v.start(ow);
        const T* weights = w + (kd * h.kernel + kh) * v.kernel;
        for (int64_t k = begin; k < end; ++k) {
          sum += static_cast<double>(row[k * v.dilation]) * static_cast<double>(weights[k]);
        }
      }
    }
  }
  return sum;
}

template <typename T>
T rounded(double value) {
  return static_cast<T>(static_cast<ComputeType<T>>(value));
}

template <typename T>
void ref_forward(const ConvProblem& p, const T* x, const T* w, const T* bias, T* y) {
  parallel_for(p.batch * p.out_channels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) {
      const int64_t n = plane / p.out_channels, m = plane % p.out_channels;
      const int64_t first = m / p.group_out() * p.group_in();
      const T* image = x + (n * p.in_channels + first) * p.in_size();
      const T* weights = w + m * p.group_in() * p.kernel_size();
      const double shift = bias ? static_cast<double>(bias[m]) : 0.0;
      T* out = y + plane * p.out_size();
      for (int64_t od = 0; od < p.axes[0].out; ++od) {
        for (int64_t oh = 0; oh < p.axes[1].out; ++oh) {
          for (int64_t ow = 0; ow < p.axes[2].out; ++ow) {
            *out++ = rounded<T>(shift + window_sum(p, image, weights, od, oh, ow));
          }
        }
      }
    }
  });
}

// The output whose window has kernel position `k` at input position `i`; -1 if there is none.
int64_t output_at(const WindowAxis& axis, int64_t i, int64_t k) {
  const int64_t distance = i + axis.pad_begin - k * axis.dilation;
  if (distance < 0 || distance % axis.stride != 0) return -1;
  const int64_t o = distance / axis.stride;
  return o < axis.out ? o : -1;
}

// Sum over the windows that hold one input position of one channel; `dy` and `w` start at the first
// output channel of the group.
template <typename T>
double covering_sum(const ConvProblem& p, const T* dy, const T* w, int64_t id, int64_t ih,
                    int64_t iw) {
  const WindowAxis &d = p.axes[0], &h = p.axes[1], &v = p.axes[2];
  const int64_t channel_step = p.group_in() * p.kernel_size();
  double sum = 0;
  for (int64_t kd = 0; kd < d.kernel; ++kd) {
    const int64_t od = output_at(d, id, kd);
    if (od < 0) continue;
    for (int64_t kh = 0; kh < h.kernel; ++kh) {
      const int64_t oh = output_at(h, ih, kh);
      if (oh < 0) continue;
      for (int64_t kw = 0; kw < v.kernel; ++kw) {
        const int64_t ow = output_at(v, iw, kw);
        if (ow < 0) continue;
        const T* gradient = dy + (od * h.out + oh) * v.out + ow;
        const T* weight = w + (kd * h.kernel + kh) * v.kernel + kw;
        for (int64_t m = 0; m < p.group_out(); ++m) {
          sum += static_cast<double>(gradient[m * p.out_size()]) *
                 static_cast<double>(weight[m * channel_step]);
        }
      }
    }
  }
  return sum;
}

template <typename T>
void ref_input(const ConvProblem& p, const T* dy, const T* w, const T* bias, T* dx) {
  parallel_for(p.batch * p.in_channels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) {
      const int64_t n = plane / p.in_channels, c = plane % p.in_channels;
      const int64_t first = c / p.group_in() * p.group_out();
      const T* gradient = dy + (n * p.out_channels + first) * p.out_size();
      const T* weights = w + (first * p.group_in() + c % p.group_in()) * p.kernel_size();
      const double shift = bias ? static_cast<double>(bias[c]) : 0.0;
      T* out = dx + plane * p.in_size();
      if (p.w_numel() == 0) {  // without elements its kernel may be of any extent
        std::fill_n(out, p.in_size(), rounded<T>(shift));
        continue;
      }
      for (int64_t id = 0; id < p.axes[0].in; ++id) {
        for (int64_t ih = 0; ih < p.axes[1].in; ++ih) {
          for (int64_t iw = 0; iw < p.axes[2].in; ++iw) {
            *out++ = rounded<T>(shift + covering_sum(p, gradient, weights, id, ih, iw));
          }
        }
      }
    }
  });
}

// Sum over batch and outputs of dy times the input under kernel position (kd, kh, kw); `dy` and `x`
// start at one channel of image 0.
template <typename T>
double tap_sum(const ConvProblem& p, const T* dy, const T* x, int64_t kd, int64_t kh, int64_t kw) {
  const WindowAxis &d = p.axes[0], &h = p.axes[1], &v = p.axes[2];
  double sum = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    const T* gradient = dy + n * p.out_channels * p.out_size();
    const T* image = x + n * p.in_channels * p.in_size();
    for (int64_t od = 0; od < d.out; ++od) {
      const int64_t id = d.start(od) + kd * d.dilation;
      if (id < 0 || id >= d.in) continue;
      for (int64_t oh = 0; oh < h.out; ++oh) {
        const int64_t ih = h.start(oh) + kh * h.dilation;
        if (ih < 0 || ih >= h.in) continue;
        for (int64_t ow = 0; ow < v.out; ++ow) {
          const int64_t iw = v.start(ow) + kw * v.dilation;
          if (iw < 0 || iw >= v.in) continue;
          sum += static_cast<double>(gradient[(od * h.out + oh) * v.out + ow]) *
                 static_cast<double>(image[(id * h.in + ih) * v.in + iw]);
        }
      }
    }
  }
  return sum;
}

template <typename T>
void ref_weight(const ConvProblem& p, const T* dy, const T* x, T* dw) {
  parallel_for(p.out_channels * p.group_in(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t m = pair / p.group_in(), c = pair % p.group_in();
      const int64_t channel = m / p.group_out() * p.group_in() + c;
      const T* gradient = dy + m * p.out_size();
      const T* image = x + channel * p.in_size();
      T* out = dw + pair * p.kernel_size();
      for (int64_t kd = 0; kd < p.axes[0].kernel; ++kd) {
        for (int64_t kh = 0; kh < p.axes[1].kernel; ++kh) {
          for (int64_t kw = 0; kw < p.axes[2].kernel; ++kw) {
            *out++ = rounded<T>(tap_sum(p, gradient, image, kd, kh, kw));
          }
        }
      }
    }
  });
}

template <typename T>
KernelFn ref_kernel(ConvNode node) {
  return [node = std::move(node)](const KernelArgs& args) {
    const T* bias = node.has_bias ? args.input<T>(2) : nullptr;
    const T *a = args.input<T>(0), *b = args.input<T>(1);
    T* out = args.output<T>(0);
    switch (node.direction) {
      case Direction::kForward:
        return ref_forward(node.problem, a, b, bias, out);
      case Direction::kInput:
        return ref_input(node.problem, a, b, bias, out);
      case Direction::kWeight:
        return ref_weight(node.problem, a, b, out);
    }
  };
}

}  // namespace

KernelFn conv_reference(DType dtype, ConvNode node) {
  return dispatch_float(
      dtype, [&]<typename T>(TypeTag<T>) -> KernelFn { return ref_kernel<T>(std::move(node)); });
}

}  // namespace ortrain::cpu
