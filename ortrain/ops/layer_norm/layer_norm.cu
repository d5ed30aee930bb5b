// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/layer_norm/norm_rows.cuh"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

KernelFn make_layer_norm(NodeSpec& spec) {
  const NormShape shape(spec.input(0).dims, spec.attrs().int_("axis"));
  const double epsilon = spec.attrs().float_("epsilon");
  const bool has_scale = spec.has_input(1), has_bias = spec.has_input(2);
  const bool has_mean = spec.has_output(1), has_inv_std = spec.has_output(2);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    return [=](const KernelArgs& args) {
      const T* x = args.input<T>(0);
      const T* scale = has_scale ? args.input<T>(1) : nullptr;
      const T* bias = has_bias ? args.input<T>(2) : nullptr;
      T* y = args.output<T>(0);
      with_row_form<T, kNormThreads, kNormPacks>(
          shape.n, pack_aligned(x, scale, bias, y), [&](auto form) {
            using Form = decltype(form);
            launch(norm_rows<false, T, Form>, row_shape<Form>(shape.rows, shape.n), args.stream,
                   shape, static_cast<C>(epsilon), x, scale, bias, y,
                   has_mean ? args.output<C>(1) : nullptr,
                   has_inv_std ? args.output<C>(2) : nullptr);
          });
    };
  });
}

// Inputs dy, x, mean, inv_std, scale; outputs dx, dscale, dbias.
KernelFn make_layer_norm_grad(NodeSpec& spec) {
  const NormShape shape(spec.input(1).dims, spec.attrs().int_("axis"));
  const bool has_scale = spec.has_input(4);
  const bool has_dx = spec.has_output(0);
  const bool has_dscale = spec.has_output(1), has_dbias = spec.has_output(2);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    using Plan = NormGradPlan<false, T>;
    if (has_dscale || has_dbias) spec.request_workspace(Plan::bytes(shape));
    return [=](const KernelArgs& args) {
      const NormGrad<T> grad{.shape = shape,
                             .epsilon = C{0},
                             .dy = args.input<T>(0),
                             .x = args.input<T>(1),
                             .scale = has_scale ? args.input<T>(4) : nullptr,
                             .mean = args.input<C>(2),
                             .inv_std = args.input<C>(3),
                             .dx = has_dx ? args.output<T>(0) : nullptr,
                             .partial = nullptr};
      Plan::run(grad, args, has_dscale ? args.output<T>(1) : nullptr,
                has_dbias ? args.output<T>(2) : nullptr);
    };
  });
}

}  // namespace

void register_layer_norm(KernelRegistry& registry) {
  registry.add("LayerNormalization",
               {{.name = "rows", .make = make_layer_norm, .inplace = {{0, 0}}}});
  registry.add("ortrain::LayerNormalizationGrad",
               {{.name = "rows", .make = make_layer_norm_grad, .inplace = {{0, 0}, {1, 0}}}});
}

}  // namespace ortrain::gpu
