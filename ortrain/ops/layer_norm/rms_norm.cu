// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/layer_norm/norm_rows.cuh"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

KernelFn make_rms_norm(NodeSpec& spec) {
  const NormShape shape(spec.input(0).dims, spec.attrs().int_("axis"));
  const double epsilon = spec.attrs().float_("epsilon");
  const bool has_scale = spec.has_input(1);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    return [=](const KernelArgs& args) {
      const T* x = args.input<T>(0);
      const T* scale = has_scale ? args.input<T>(1) : nullptr;
      T* y = args.output<T>(0);
      with_row_form<T, kNormThreads, kNormPacks>(
          shape.n, pack_aligned(x, scale, y), [&](auto form) {
            using Form = decltype(form);
            launch(norm_rows<true, T, Form>, row_shape<Form>(shape.rows, shape.n), args.stream,
                   shape, static_cast<C>(epsilon), x, scale, static_cast<const T*>(nullptr), y,
                   static_cast<C*>(nullptr), static_cast<C*>(nullptr));
          });
    };
  });
}

// Inputs dy, x, scale; outputs dx, dscale.
KernelFn make_rms_norm_grad(NodeSpec& spec) {
  const NormShape shape(spec.input(1).dims, spec.attrs().int_("axis"));
  const double epsilon = spec.attrs().float_("epsilon");
  const bool has_scale = spec.has_input(2);
  const bool has_dx = spec.has_output(0), has_dscale = spec.has_output(1);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    using Plan = NormGradPlan<true, T>;
    if (has_dscale) spec.request_workspace(Plan::bytes(shape));
    return [=](const KernelArgs& args) {
      const NormGrad<T> grad{.shape = shape,
                             .epsilon = static_cast<C>(epsilon),
                             .dy = args.input<T>(0),
                             .x = args.input<T>(1),
                             .scale = has_scale ? args.input<T>(2) : nullptr,
                             .mean = nullptr,
                             .inv_std = nullptr,
                             .dx = has_dx ? args.output<T>(0) : nullptr,
                             .partial = nullptr};
      Plan::run(grad, args, has_dscale ? args.output<T>(1) : nullptr, nullptr);
    };
  });
}

}  // namespace

void register_rms_norm(KernelRegistry& registry) {
  registry.add("RMSNormalization", {{.name = "rows", .make = make_rms_norm, .inplace = {{0, 0}}}});
  registry.add("ortrain::RMSNormalizationGrad",
               {{.name = "rows", .make = make_rms_norm_grad, .inplace = {{0, 0}, {1, 0}}}});
}

}  // namespace ortrain::gpu
