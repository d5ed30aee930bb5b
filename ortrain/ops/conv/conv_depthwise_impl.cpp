// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <type_traits>
#include <utility>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/row_access.h"
#include "ortrain/cpu/scratch.h"
#include "ortrain/cpu/simd/row_ops.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ops/conv/conv_kernels.h"

namespace ortrain::cpu {
namespace {

using ops::ConvProblem;
using ops::WindowAxis;

// One channel of x per group: each place of the kernel adds a shifted row times one weight.

// Beyond this, a group's weights make a matrix that is worth a product.
constexpr int64_t kMostOutputsPerChannel = 4;

// Calls body(weight, place in x, place in y, count) for the runs of one plane along the width:
// place i of the run is x[place + i * stride] and y[place + i].
template <typename Body>
void for_each_run(const ConvProblem& p, Body&& body) {
  const WindowAxis &d = p.axes[0], &h = p.axes[1], &v = p.axes[2];
  for (int64_t od = 0; od < d.out; ++od) {
    for (int64_t oh = 0; oh < h.out; ++oh) {
      const int64_t y_row = (od * h.out + oh) * v.out;
      for (int64_t kd = d.k_begin(od); kd < d.k_end(od); ++kd) {
        for (int64_t kh = h.k_begin(oh); kh < h.k_end(oh); ++kh) {
          const int64_t x_row = ((d.start(od) + kd * d.dilation) * h.in +  //
                                 h.start(oh) + kh * h.dilation) *
                                v.in;
          const int64_t weights = (kd * h.kernel + kh) * v.kernel;
          for (int64_t k = 0; k < v.kernel; ++k) {
            const auto [first, last] = v.outputs_of(k);
            if (first == last) continue;
            body(weights + k, x_row + v.start(first) + k * v.dilation, y_row + first, last - first);
          }
        }
      }
    }
  }
}

// Planes in the type to compute in: in place, or in scratch memory of the calling thread.
template <typename T>
class Planes {
 public:
  using C = ComputeType<T>;
  static constexpr bool kDirect = std::is_same_v<T, C>;

  explicit Planes(int64_t most) : most_(most) {
    if constexpr (!kDirect) buffers_ = scratch<C>(ScratchSlot::kConvert, 2, most);
  }
  const C* read(int buffer, const T* plane, int64_t count) {
    if constexpr (kDirect) {
      return plane;
    } else {
      C* wide = buffers_ + buffer * most_;
      widen(kStorageOf<T>, reinterpret_cast<const uint16_t*>(plane), wide, count);
      return wide;
    }
  }
  // Where to compute a plane; `write` puts it there.
  C* target(int buffer, T* plane) {
    if constexpr (kDirect) {
      return plane;
    } else {
      return buffers_ + buffer * most_;
    }
  }
  void write(int buffer, T* plane, int64_t count) {
    if constexpr (!kDirect) {
      narrow(kStorageOf<T>, buffers_ + buffer * most_, reinterpret_cast<uint16_t*>(plane), count);
    }
  }

 private:
  int64_t most_;
  C* buffers_ = nullptr;
};

template <typename T>
class Depthwise {
 public:
  using C = ComputeType<T>;

  explicit Depthwise(ConvNode node) : node_(std::move(node)), p_(node_.problem) {}

  void run(const KernelArgs& args) const {
    const T *a = args.input<T>(0), *b = args.input<T>(1);
    const T* bias = node_.has_bias ? args.input<T>(2) : nullptr;
    switch (node_.direction) {
      case Direction::kForward:
        return forward(a, b, bias, args.output<T>(0));
      case Direction::kInput:
        return input(a, b, bias, args.output<T>(0));
      case Direction::kWeight:
        return weight(a, b, args.output<T>(0));
    }
  }

 private:
  int64_t most() const { return std::max(p_.in_size(), p_.out_size()); }
  // Of a channel of one image.
  int64_t work() const { return p_.out_size() * p_.kernel_size(); }
  int64_t stride() const { return p_.axes[2].stride; }

  void forward(const T* x, const T* w, const T* bias, T* y) const {
    parallel_for(p_.batch * p_.out_channels, row_grain(work()), [&](int64_t begin, int64_t end) {
      Planes<T> planes(most());
      for (int64_t i = begin; i < end; ++i) {
        const int64_t channel = i % p_.out_channels;
        const int64_t source = i / p_.out_channels * p_.in_channels + channel / p_.group_out();
        const C* in = planes.read(0, x + source * p_.in_size(), p_.in_size());
        C* out = planes.target(1, y + i * p_.out_size());
        std::fill_n(out, p_.out_size(), bias ? static_cast<C>(bias[channel]) : C(0));
        const T* weights = w + channel * p_.kernel_size();
        for_each_run(p_, [&](int64_t k, int64_t at, int64_t to, int64_t count) {
          const C factor = static_cast<C>(weights[k]);
          if (stride() == 1) return ops_.axpy(factor, in + at, out + to, count);
          for (int64_t j = 0; j < count; ++j) out[to + j] += factor * in[at + j * stride()];
        });
        planes.write(1, y + i * p_.out_size(), p_.out_size());
      }
    });
  }

  void input(const T* dy, const T* w, const T* bias, T* dx) const {
    parallel_for(p_.batch * p_.in_channels, row_grain(work()), [&](int64_t begin, int64_t end) {
      Planes<T> planes(most());
      for (int64_t i = begin; i < end; ++i) {
        const int64_t channel = i % p_.in_channels;
        C* out = planes.target(1, dx + i * p_.in_size());
        std::fill_n(out, p_.in_size(), bias ? static_cast<C>(bias[channel]) : C(0));
        for (int64_t m = 0; m < p_.group_out(); ++m) {
          const T* from = dy + (i * p_.group_out() + m) * p_.out_size();
          const C* gradient = planes.read(0, from, p_.out_size());
          const T* weights = w + (channel * p_.group_out() + m) * p_.kernel_size();
          for_each_run(p_, [&](int64_t k, int64_t at, int64_t to, int64_t count) {
            const C factor = static_cast<C>(weights[k]);
            if (stride() == 1) return ops_.axpy(factor, gradient + to, out + at, count);
            for (int64_t j = 0; j < count; ++j) out[at + j * stride()] += factor * gradient[to + j];
          });
        }
        planes.write(1, dx + i * p_.in_size(), p_.in_size());
      }
    });
  }

  void weight(const T* dy, const T* x, T* dw) const {
    parallel_for(p_.out_channels, row_grain(work()), [&](int64_t begin, int64_t end) {
      Planes<T> planes(most());
      auto* sums = scratch<double>(ScratchSlot::kKernel, p_.kernel_size());
      for (int64_t channel = begin; channel < end; ++channel) {
        std::fill_n(sums, p_.kernel_size(), 0.0);
        for (int64_t n = 0; n < p_.batch; ++n) {
          const int64_t source = n * p_.in_channels + channel / p_.group_out();
          const C* in = planes.read(0, x + source * p_.in_size(), p_.in_size());
          const T* from = dy + (n * p_.out_channels + channel) * p_.out_size();
          const C* gradient = planes.read(1, from, p_.out_size());
          for_each_run(p_, [&](int64_t k, int64_t at, int64_t to, int64_t count) {
            if (stride() == 1) {
              sums[k] += static_cast<double>(ops_.dot(in + at, gradient + to, count));
              return;
            }
            C sum = 0;
            for (int64_t j = 0; j < count; ++j) sum += in[at + j * stride()] * gradient[to + j];
            sums[k] += static_cast<double>(sum);
          });
        }
        for (int64_t k = 0; k < p_.kernel_size(); ++k) {
          dw[channel * p_.kernel_size() + k] = static_cast<T>(static_cast<C>(sums[k]));
        }
      }
    });
  }

  ConvNode node_;
  const ConvProblem& p_;
  RowOps<C> ops_ = row_ops<C>();
};

}  // namespace

std::optional<std::string> conv_depthwise_refuses(const ConvNode& node) {
  const ConvProblem& p = node.problem;
  if (p.x_numel() == 0 || p.y_numel() == 0 || p.w_numel() == 0) return "an empty tensor";
  if (p.group_in() != 1) return "groups of more than one channel";
  if (p.group_out() > kMostOutputsPerChannel) return "many outputs for each channel";
  return std::nullopt;
}

KernelFn conv_depthwise(DType dtype, ConvNode node) {
  return dispatch_float(dtype, [&]<typename T>(TypeTag<T>) -> KernelFn {
    auto depthwise = std::make_shared<const Depthwise<T>>(std::move(node));
    return [depthwise](const KernelArgs& args) { depthwise->run(args); };
  });
}

}  // namespace ortrain::cpu
