// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/ops/batch_norm/channels.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// A vector of per-channel values of any float type, or absent.
class ChannelValues {
 public:
  ChannelValues() = default;
  ChannelValues(const NodeSpec& spec, size_t index)
      : index_(index), dtype_(spec.has_input(index) ? spec.input(index).dtype : DType::undefined) {}

  bool present() const { return dtype_ != DType::undefined; }
  double get(const KernelArgs& args, int64_t c, double absent) const {
    switch (dtype_) {
      case DType::f32:
        return args.input<float>(index_)[c];
      case DType::f64:
        return args.input<double>(index_)[c];
      case DType::f16:
        return args.input<Float16>(index_)[c];
      case DType::bf16:
        return args.input<BFloat16>(index_)[c];
      default:
        return absent;
    }
  }

 private:
  size_t index_ = 0;
  DType dtype_ = DType::undefined;
};

class ChannelResult {
 public:
  ChannelResult() = default;
  ChannelResult(const NodeSpec& spec, size_t index)
      : index_(index),
        dtype_(spec.has_output(index) ? spec.output(index).dtype : DType::undefined) {}

  bool wanted() const { return dtype_ != DType::undefined; }
  void set(const KernelArgs& args, int64_t c, double value) const {
    const float narrow = static_cast<float>(value);
    switch (dtype_) {
      case DType::f32:
        args.output<float>(index_)[c] = narrow;
        break;
      case DType::f64:
        args.output<double>(index_)[c] = value;
        break;
      case DType::f16:
        args.output<Float16>(index_)[c] = Float16(narrow);
        break;
      case DType::bf16:
        args.output<BFloat16>(index_)[c] = BFloat16(narrow);
        break;
      default:
        break;
    }
  }

 private:
  size_t index_ = 0;
  DType dtype_ = DType::undefined;
};

template <typename Channel>
KernelFn make_training(NodeSpec& spec) {
  using T = typename Channel::T;
  const Layout layout(spec.input(0).dims);
  const double epsilon = spec.attrs().float_("epsilon");
  const double momentum = spec.attrs().float_("momentum");
  const ChannelValues scale(spec, 1), bias(spec, 2), running_mean(spec, 3), running_var(spec, 4);
  const ChannelResult next_mean(spec, 1), next_var(spec, 2), save_mean(spec, 3),
      save_invstd(spec, 4);
  const bool wants_y = spec.has_output(0);
  return [=](const KernelArgs& args) {
    const T* x = args.input<T>(0);
    for_each_channel(layout, [&](int64_t c) {
      const Moments m = Channel::moments(layout, 0, layout.batch, c, x);
      const double count = static_cast<double>(layout.count());
      // Without any element the statistics stay as they are.
      const double invstd = count == 0 ? 0 : 1 / std::sqrt(m.variance + epsilon);
      const double rate = count == 0 ? 0 : momentum;
      const double unbiased = count > 1 ? m.variance * (count / (count - 1)) : m.variance;
      if (next_mean.wanted()) {
        next_mean.set(args, c, (1 - rate) * running_mean.get(args, c, 0) + rate * m.mean);
      }
      if (next_var.wanted()) {
        next_var.set(args, c, (1 - rate) * running_var.get(args, c, 1) + rate * unbiased);
      }
      save_mean.set(args, c, m.mean);
      save_invstd.set(args, c, invstd);
      if (wants_y) {
        Channel::normalise(layout, 0, layout.batch, c, x, m.mean, invstd * scale.get(args, c, 1),
                           bias.get(args, c, 0), args.output<T>(0));
      }
    });
  };
}

// With xhat = (x - mean) * invstd and n values per channel:
//   dx = scale * invstd * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n)
//      + (dmean + 2 * dvar * (x - mean)) / n
// where dmean and dvar gather what comes in through the statistics.
template <typename Channel>
KernelFn make_grad(NodeSpec& spec) {
  using T = typename Channel::T;
  const Layout layout(spec.input(1).dims);
  const double momentum = spec.attrs().float_("momentum");
  const bool has_dy = spec.has_input(0), wants_dx = spec.has_output(0);
  const ChannelValues scale(spec, 2), mean(spec, 3), invstd(spec, 4), d_next_mean(spec, 5),
      d_next_var(spec, 6), d_mean(spec, 7), d_invstd(spec, 8);
  const ChannelResult dscale(spec, 1), dbias(spec, 2);
  return [=](const KernelArgs& args) {
    const T* dy = has_dy ? args.input<T>(0) : nullptr;
    const T* x = args.input<T>(1);
    const double count = static_cast<double>(layout.count());
    for_each_channel(layout, [&](int64_t c) {
      const double m = mean.get(args, c, 0), r = invstd.get(args, c, 0);
      const GradientSums sums = Channel::gradient_sums(layout, 0, layout.batch, c, dy, x, m);
      dscale.set(args, c, sums.dy_centred * r);
      dbias.set(args, c, sums.dy);
      if (!wants_dx || count == 0) return;
      const double from_mean = momentum * d_next_mean.get(args, c, 0) + d_mean.get(args, c, 0);
      const double unbiased = count > 1 ? count / (count - 1) : 1;
      const double from_var = momentum * unbiased * d_next_var.get(args, c, 0) -
                              0.5 * r * r * r * d_invstd.get(args, c, 0);
      const double factor = scale.get(args, c, 1) * r;
      Channel::input_gradient(layout, 0, layout.batch, c, dy, x, m, factor,
                              (2 * from_var - factor * r * r * sums.dy_centred) / count,
                              (from_mean - factor * sums.dy) / count, args.output<T>(0));
    });
  };
}

template <typename Channel>
KernelFn make_batch_normalization(NodeSpec& spec) {
  using T = typename Channel::T;
  const Layout layout(spec.input(0).dims);
  const double epsilon = spec.attrs().float_("epsilon");
  const double momentum = spec.attrs().float_("momentum");
  const bool training = spec.attrs().int_("training_mode") != 0, wants_y = spec.has_output(0);
  const ChannelValues scale(spec, 1), bias(spec, 2), mean(spec, 3), variance(spec, 4);
  const ChannelResult next_mean(spec, 1), next_var(spec, 2);
  return [=](const KernelArgs& args) {
    const T* x = args.input<T>(0);
    for_each_channel(layout, [&](int64_t c) {
      Moments m{mean.get(args, c, 0), variance.get(args, c, 1)};
      if (training && layout.count() > 0) {
        const Moments batch = Channel::moments(layout, 0, layout.batch, c, x);
        next_mean.set(args, c, m.mean * momentum + batch.mean * (1 - momentum));
        next_var.set(args, c, m.variance * momentum + batch.variance * (1 - momentum));
        m = batch;
      } else {
        next_mean.set(args, c, m.mean);
        next_var.set(args, c, m.variance);
      }
      if (wants_y) {
        const double invstd = 1 / std::sqrt(m.variance + epsilon);
        Channel::normalise(layout, 0, layout.batch, c, x, m.mean, invstd * scale.get(args, c, 1),
                           bias.get(args, c, 0), args.output<T>(0));
      }
    });
  };
}

template <typename Channel>
KernelFn make_inference_grad(NodeSpec& spec) {
  using T = typename Channel::T;
  const Layout layout(spec.input(1).dims);
  const double epsilon = spec.attrs().float_("epsilon");
  const bool wants_dx = spec.has_output(0);
  const ChannelValues scale(spec, 2), mean(spec, 3), variance(spec, 4);
  const ChannelResult dscale(spec, 1), dbias(spec, 2), dmean(spec, 3), dvar(spec, 4);
  const bool wants_sums = dscale.wanted() || dbias.wanted() || dmean.wanted() || dvar.wanted();
  return [=](const KernelArgs& args) {
    const T *dy = args.input<T>(0), *x = args.input<T>(1);
    for_each_channel(layout, [&](int64_t c) {
      const double m = mean.get(args, c, 0);
      const double invstd = 1 / std::sqrt(variance.get(args, c, 1) + epsilon);
      const double factor = scale.get(args, c, 1) * invstd;
      if (wants_sums) {
        const GradientSums sums = Channel::gradient_sums(layout, 0, layout.batch, c, dy, x, m);
        dscale.set(args, c, sums.dy_centred * invstd);
        dbias.set(args, c, sums.dy);
        dmean.set(args, c, -factor * sums.dy);
        dvar.set(args, c, -0.5 * factor * invstd * invstd * sums.dy_centred);
      }
      if (wants_dx) {
        Channel::input_gradient(layout, 0, layout.batch, c, dy, x, m, factor, 0, 0,
                                args.output<T>(0));
      }
    });
  };
}

template <typename Channel>
KernelFn make_instance(NodeSpec& spec) {
  using T = typename Channel::T;
  const Layout layout(spec.input(0).dims);
  const double epsilon = spec.attrs().float_("epsilon");
  const ChannelValues scale(spec, 1), bias(spec, 2);
  return [=](const KernelArgs& args) {
    const T* x = args.input<T>(0);
    for_each_channel(layout, [&](int64_t c) {
      for (int64_t n = 0; n < layout.batch; ++n) {
        const Moments m = Channel::moments(layout, n, 1, c, x);
        const double invstd = 1 / std::sqrt(m.variance + epsilon);
        Channel::normalise(layout, n, 1, c, x, m.mean, invstd * scale.get(args, c, 1),
                           bias.get(args, c, 0), args.output<T>(0));
      }
    });
  };
}

template <typename Channel>
KernelFn make_instance_grad(NodeSpec& spec) {
  using T = typename Channel::T;
  const Layout layout(spec.input(1).dims);
  const double epsilon = spec.attrs().float_("epsilon");
  const bool wants_dx = spec.has_output(0);
  const ChannelValues scale(spec, 2);
  const ChannelResult dscale(spec, 1), dbias(spec, 2);
  return [=](const KernelArgs& args) {
    const T *dy = args.input<T>(0), *x = args.input<T>(1);
    const double count = static_cast<double>(layout.size);
    for_each_channel(layout, [&](int64_t c) {
      double scale_sum = 0, bias_sum = 0;
      for (int64_t n = 0; n < layout.batch; ++n) {
        const Moments m = Channel::moments(layout, n, 1, c, x);
        const double invstd = 1 / std::sqrt(m.variance + epsilon);
        const GradientSums sums = Channel::gradient_sums(layout, n, 1, c, dy, x, m.mean);
        scale_sum += sums.dy_centred * invstd;
        bias_sum += sums.dy;
        if (!wants_dx || count == 0) continue;
        const double factor = scale.get(args, c, 1) * invstd;
        Channel::input_gradient(layout, n, 1, c, dy, x, m.mean, factor,
                                -factor * invstd * invstd * sums.dy_centred / count,
                                -factor * sums.dy / count, args.output<T>(0));
      }
      dscale.set(args, c, scale_sum);
      dbias.set(args, c, bias_sum);
    });
  };
}

// The kernels of one operator: make.operator()<Channel>(spec) with the way to go through a channel.
// The element type of input `typed` decides, since dy may be absent.
template <typename Make>
std::vector<Kernel> kernels(size_t typed, Make make, std::vector<std::pair<int, int>> inplace) {
  const auto refuse = [typed](const NodeSpec& spec) -> std::optional<std::string> {
    const TensorSpec& x = spec.input(typed);
    if (x.dtype != DType::f32 && x.dtype != DType::f64) return "for f32 and f64 only";
    constexpr int64_t kShortest = 8;
    if (Layout(x.dims).size < kShortest) return "fewer than 8 values in a row";
    return std::nullopt;
  };
  const auto make_rows = [typed, make](NodeSpec& spec) {
    return spec.input(typed).dtype == DType::f32 ? make.template operator()<Rows<float>>(spec)
                                                 : make.template operator()<Rows<double>>(spec);
  };
  const auto make_scalar = [typed, make](NodeSpec& spec) {
    return dispatch_float(spec.input(typed).dtype, [&]<typename T>(TypeTag<T>) {
      return make.template operator()<Scalar<T>>(spec);
    });
  };
  return {{.name = "simd", .why_not = refuse, .make = make_rows, .inplace = inplace},
          {.name = "ref", .make = make_scalar, .inplace = inplace}};
}

}  // namespace

void register_batch_norm(KernelRegistry& registry) {
  // A channel of dy is summed before dx, which may lie where dy is, is written.
  const std::vector<std::pair<int, int>> in_place{{0, 0}};
  registry.add("ortrain::BatchNormTraining",
               kernels(0, []<typename C>(NodeSpec& spec) { return make_training<C>(spec); }, {}));
  registry.add("ortrain::BatchNormGrad",
               kernels(1, []<typename C>(NodeSpec& spec) { return make_grad<C>(spec); }, in_place));
  registry.add(
      "BatchNormalization",
      kernels(0, []<typename C>(NodeSpec& spec) { return make_batch_normalization<C>(spec); }, {}));
  registry.add(
      "ortrain::BatchNormInferenceGrad",
      kernels(
          1, []<typename C>(NodeSpec& spec) { return make_inference_grad<C>(spec); }, in_place));
  registry.add("InstanceNormalization",
               kernels(0, []<typename C>(NodeSpec& spec) { return make_instance<C>(spec); }, {}));
  registry.add(
      "ortrain::InstanceNormGrad",
      kernels(1, []<typename C>(NodeSpec& spec) { return make_instance_grad<C>(spec); }, in_place));
}

}  // namespace ortrain::cpu
