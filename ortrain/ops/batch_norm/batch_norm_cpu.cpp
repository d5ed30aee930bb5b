// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// x as [N, C, S]; every loop is parallel over channels, and sums are made in double in an order
// that does not depend on the threads.
struct Layout {
  int64_t batch = 0, channels = 0, size = 0;

  explicit Layout(const Dims& x) : batch(x[0]), channels(x[1]), size(1) {
    for (size_t i = 2; i < x.size(); ++i) size *= x[i];
  }
  int64_t count() const { return batch * size; }  // per channel
  int64_t offset(int64_t n, int64_t c) const { return (n * channels + c) * size; }
};

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

// term(i) for i in [0, n), summed in eight lanes so that the loop vectorises.
template <typename Term>
double lane_sum(int64_t n, Term&& term) {
  constexpr int64_t kLanes = 8;
  std::array<double, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int64_t lane = 0; i < n; ++i, ++lane) lanes[lane] += term(i);
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

// Sum over images [first, first + images) of channel c; term gets the element's offset.
template <typename Term>
double channel_sum(const Layout& layout, int64_t first, int64_t images, int64_t c, Term&& term) {
  double sum = 0;
  if (layout.size < 8) {
    for (int64_t s = 0; s < layout.size; ++s) {
      sum += lane_sum(images, [&](int64_t n) { return term(layout.offset(first + n, c) + s); });
    }
    return sum;
  }
  for (int64_t n = first; n < first + images; ++n) {
    const int64_t at = layout.offset(n, c);
    sum += lane_sum(layout.size, [&](int64_t i) { return term(at + i); });
  }
  return sum;
}

template <typename Body>
void for_channel_elements(const Layout& layout, int64_t first, int64_t images, int64_t c,
                          Body&& body) {
  for (int64_t n = first; n < first + images; ++n) {
    const int64_t at = layout.offset(n, c);
    for (int64_t i = at; i < at + layout.size; ++i) body(i);
  }
}

template <typename Body>
void for_each_channel(const Layout& layout, Body&& body) {
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, layout.count()));
  parallel_for(layout.channels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) body(c);
  });
}

struct Moments {
  double mean = 0;
  double variance = 0;  // biased
};

// Two passes, so that a mean far from zero costs no digits.
template <typename T>
Moments moments(const Layout& layout, int64_t first, int64_t images, int64_t c, const T* x) {
  const double count = static_cast<double>(images * layout.size);
  if (count == 0) return {};
  const double mean =
      channel_sum(layout, first, images, c, [&](int64_t i) { return static_cast<double>(x[i]); }) /
      count;
  const double squares = channel_sum(layout, first, images, c, [&](int64_t i) {
    const double distance = static_cast<double>(x[i]) - mean;
    return distance * distance;
  });
  return {mean, squares / count};
}

// y = (x - mean) * factor + shift on images of one channel.
template <typename T>
void normalise(const Layout& layout, int64_t first, int64_t images, int64_t c, const T* x,
               double mean, double factor, double shift, T* y) {
  using C = ComputeType<T>;
  const C m = static_cast<C>(mean), f = static_cast<C>(factor), s = static_cast<C>(shift);
  for_channel_elements(layout, first, images, c, [&](int64_t i) {
    y[i] = static_cast<T>((static_cast<C>(x[i]) - m) * f + s);
  });
}

// The sums over dy that every gradient of a normalisation is made of.
struct GradientSums {
  double dy = 0;
  double dy_centred = 0;  // dy * (x - mean)
};

template <typename T>
GradientSums gradient_sums(const Layout& layout, int64_t first, int64_t images, int64_t c,
                           const T* dy, const T* x, double mean) {
  if (dy == nullptr) return {};
  return {
      channel_sum(layout, first, images, c, [&](int64_t i) { return static_cast<double>(dy[i]); }),
      channel_sum(layout, first, images, c, [&](int64_t i) {
        return static_cast<double>(dy[i]) * (static_cast<double>(x[i]) - mean);
      })};
}

// dx = dy * factor + (x - mean) * slope + shift.
template <typename T>
void input_gradient(const Layout& layout, int64_t first, int64_t images, int64_t c, const T* dy,
                    const T* x, double mean, double factor, double slope, double shift, T* dx) {
  using C = ComputeType<T>;
  const C m = static_cast<C>(mean), f = static_cast<C>(factor);
  const C k = static_cast<C>(slope), s = static_cast<C>(shift);
  for_channel_elements(layout, first, images, c, [&](int64_t i) {
    const C centred = (static_cast<C>(x[i]) - m) * k + s;
    dx[i] = static_cast<T>(dy ? static_cast<C>(dy[i]) * f + centred : centred);
  });
}

template <typename T>
KernelFn make_training(NodeSpec& spec) {
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
      const Moments m = moments(layout, 0, layout.batch, c, x);
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
        normalise(layout, 0, layout.batch, c, x, m.mean, invstd * scale.get(args, c, 1),
                  bias.get(args, c, 0), args.output<T>(0));
      }
    });
  };
}

// With xhat = (x - mean) * invstd and n values per channel:
//   dx = scale * invstd * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n)
//      + (dmean + 2 * dvar * (x - mean)) / n
// where dmean and dvar gather what comes in through the statistics.
template <typename T>
KernelFn make_grad(NodeSpec& spec) {
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
      const GradientSums sums = gradient_sums(layout, 0, layout.batch, c, dy, x, m);
      dscale.set(args, c, sums.dy_centred * r);
      dbias.set(args, c, sums.dy);
      if (!wants_dx || count == 0) return;
      const double from_mean = momentum * d_next_mean.get(args, c, 0) + d_mean.get(args, c, 0);
      const double unbiased = count > 1 ? count / (count - 1) : 1;
      const double from_var = momentum * unbiased * d_next_var.get(args, c, 0) -
                              0.5 * r * r * r * d_invstd.get(args, c, 0);
      const double factor = scale.get(args, c, 1) * r;
      input_gradient(layout, 0, layout.batch, c, dy, x, m, factor,
                     (2 * from_var - factor * r * r * sums.dy_centred) / count,
                     (from_mean - factor * sums.dy) / count, args.output<T>(0));
    });
  };
}

template <typename T>
KernelFn make_batch_normalization(NodeSpec& spec) {
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
        const Moments batch = moments(layout, 0, layout.batch, c, x);
        next_mean.set(args, c, m.mean * momentum + batch.mean * (1 - momentum));
        next_var.set(args, c, m.variance * momentum + batch.variance * (1 - momentum));
        m = batch;
      } else {
        next_mean.set(args, c, m.mean);
        next_var.set(args, c, m.variance);
      }
      if (wants_y) {
        const double invstd = 1 / std::sqrt(m.variance + epsilon);
        normalise(layout, 0, layout.batch, c, x, m.mean, invstd * scale.get(args, c, 1),
                  bias.get(args, c, 0), args.output<T>(0));
      }
    });
  };
}

template <typename T>
KernelFn make_inference_grad(NodeSpec& spec) {
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
        const GradientSums sums = gradient_sums(layout, 0, layout.batch, c, dy, x, m);
        dscale.set(args, c, sums.dy_centred * invstd);
        dbias.set(args, c, sums.dy);
        dmean.set(args, c, -factor * sums.dy);
        dvar.set(args, c, -0.5 * factor * invstd * invstd * sums.dy_centred);
      }
      if (wants_dx) {
        input_gradient(layout, 0, layout.batch, c, dy, x, m, factor, 0, 0, args.output<T>(0));
      }
    });
  };
}

template <typename T>
KernelFn make_instance(NodeSpec& spec) {
  const Layout layout(spec.input(0).dims);
  const double epsilon = spec.attrs().float_("epsilon");
  const ChannelValues scale(spec, 1), bias(spec, 2);
  return [=](const KernelArgs& args) {
    const T* x = args.input<T>(0);
    for_each_channel(layout, [&](int64_t c) {
      for (int64_t n = 0; n < layout.batch; ++n) {
        const Moments m = moments(layout, n, 1, c, x);
        const double invstd = 1 / std::sqrt(m.variance + epsilon);
        normalise(layout, n, 1, c, x, m.mean, invstd * scale.get(args, c, 1), bias.get(args, c, 0),
                  args.output<T>(0));
      }
    });
  };
}

template <typename T>
KernelFn make_instance_grad(NodeSpec& spec) {
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
        const Moments m = moments(layout, n, 1, c, x);
        const double invstd = 1 / std::sqrt(m.variance + epsilon);
        const GradientSums sums = gradient_sums(layout, n, 1, c, dy, x, m.mean);
        scale_sum += sums.dy_centred * invstd;
        bias_sum += sums.dy;
        if (!wants_dx || count == 0) continue;
        const double factor = scale.get(args, c, 1) * invstd;
        input_gradient(layout, n, 1, c, dy, x, m.mean, factor,
                       -factor * invstd * invstd * sums.dy_centred / count,
                       -factor * sums.dy / count, args.output<T>(0));
      }
      dscale.set(args, c, scale_sum);
      dbias.set(args, c, bias_sum);
    });
  };
}

}  // namespace

void register_batch_norm(KernelRegistry& registry) {
  // The element type of x decides; it is input 1 of the gradients, whose dy may be absent.
  registry.add("ortrain::BatchNormTraining",
               {{.name = "ref", .make = [](NodeSpec& spec) {
                   return dispatch_float(spec.input(0).dtype, [&]<typename T>(TypeTag<T>) {
                     return make_training<T>(spec);
                   });
                 }}});
  registry.add("ortrain::BatchNormGrad", {{.name = "ref", .make = [](NodeSpec& spec) {
                                             return dispatch_float(spec.input(1).dtype,
                                                                   [&]<typename T>(TypeTag<T>) {
                                                                     return make_grad<T>(spec);
                                                                   });
                                           }}});
  registry.add("BatchNormalization", {{.name = "ref", .make = [](NodeSpec& spec) {
                                         return dispatch_float(
                                             spec.input(0).dtype, [&]<typename T>(TypeTag<T>) {
                                               return make_batch_normalization<T>(spec);
                                             });
                                       }}});
  registry.add("ortrain::BatchNormInferenceGrad",
               {{.name = "ref", .make = [](NodeSpec& spec) {
                   return dispatch_float(spec.input(1).dtype, [&]<typename T>(TypeTag<T>) {
                     return make_inference_grad<T>(spec);
                   });
                 }}});
  registry.add("InstanceNormalization", {{.name = "ref", .make = [](NodeSpec& spec) {
                                            return dispatch_float(spec.input(0).dtype,
                                                                  [&]<typename T>(TypeTag<T>) {
                                                                    return make_instance<T>(spec);
                                                                  });
                                          }}});
  registry.add("ortrain::InstanceNormGrad",
               {{.name = "ref", .make = [](NodeSpec& spec) {
                   return dispatch_float(spec.input(1).dtype, [&]<typename T>(TypeTag<T>) {
                     return make_instance_grad<T>(spec);
                   });
                 }}});
}

}  // namespace ortrain::cpu
