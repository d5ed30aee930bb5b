// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ortrain/gpu/column_sums.h"
#include "ortrain/ops/batch_norm/unit_sums.cuh"
#include "ortrain/runtime/kernel_registry.h"

// Group normalization, and instance normalization: as many groups as channels.
namespace ortrain::gpu {
namespace {

// x as [batch, groups, channels per group, space].
struct Groups {
  int64_t batch, groups, per_group, space;
  double epsilon;

  Groups(const NodeSpec& spec, size_t x, bool instance)
      : batch(spec.input(x).dims[0]),
        groups(instance ? spec.input(x).dims[1] : spec.attrs().int_("num_groups")),
        per_group(groups == 0 ? 0 : spec.input(x).dims[1] / groups),
        space(num_elements(Dims(spec.input(x).dims.begin() + 2, spec.input(x).dims.end()))),
        epsilon(spec.attrs().float_("epsilon")) {}

  ORTRAIN_HOST_DEVICE int64_t channels() const { return groups * per_group; }
  // Statistics are of these, gradients of parameters of those.
  ORTRAIN_HOST_DEVICE Units rows() const { return {1, batch * groups, per_group * space}; }
  ORTRAIN_HOST_DEVICE Units maps() const { return {1, batch * channels(), space}; }
};

// Workspace: what becomes of each map, the statistics of each row, and states of parts.
template <class C>
struct GroupWorkspace {
  Affine<C>* affine;
  C *means, *inv_std;
  Moments<C>* moments;
  TwoSums<C>* sums;  // of the parts; then of the maps, {sum(dy), sum(dy h)}
  C* map_sums;       // [batch, {dscale, dbias}, channels]

  GroupWorkspace(const KernelArgs& args, const Groups& g, const UnitPlan& rows,
                 const UnitPlan& maps) {
    auto* at = static_cast<char*>(args.workspace);
    const auto take = [&at, this](auto*& place, int64_t count) {
      using Element = std::remove_reference_t<decltype(*place)>;
      place = reinterpret_cast<Element*>(at);
      const ByteCount taken = bytes_of<Element>(count).rounded_up(64);
      at += taken.value();
      bytes += taken;
    };
    take(affine, g.maps().units);
    take(means, g.rows().units);
    take(inv_std, g.rows().units);
    take(moments, rows.states(g.rows()));
    take(sums, maps.states(g.maps()));
    take(map_sums, 2 * g.maps().units);
  }
  ByteCount bytes;
};

template <class C>
ByteCount workspace_bytes(const Groups& g, const UnitPlan& rows, const UnitPlan& maps) {
  return GroupWorkspace<C>(KernelArgs{}, g, rows, maps).bytes;
}

// Statistics of each row, and with `affine` what they make of its maps.
template <class T>
__global__ void __launch_bounds__(128)
    finish_groups(Groups g, UnitPlan p, const Moments<ComputeType<T>>* partial, const T* scale,
                  const T* bias, ComputeType<T>* means, ComputeType<T>* inv_std,
                  Affine<ComputeType<T>>* affine) {
  using C = ComputeType<T>;
  const int64_t row = unit_of_warp();
  if (row >= g.rows().units) return;
  const Moments<C> m = join_parts(partial, g.rows(), p, row, Moments<C>::none(), JoinMoments());
  const C r = C{1} / static_cast<C>(sqrt(m.variance() + static_cast<C>(g.epsilon)));
  if (lane() == 0) {
    means[row] = m.mean;
    inv_std[row] = r;
  }
  if (affine == nullptr) return;
  for (int64_t k = lane(); k < g.per_group; k += kWarpSize) {
    const int64_t channel = row % g.groups * g.per_group + k;
    affine[row * g.per_group + k] = {m.mean, C{0},
                                     scale == nullptr ? r : r * static_cast<C>(scale[channel]),
                                     bias == nullptr ? C{0} : static_cast<C>(bias[channel])};
  }
}

template <bool kInstance>
KernelFn make_forward(NodeSpec& spec) {
  const Groups g(spec, 0, kInstance);
  const UnitPlan rows(g.rows()), maps(g.maps());
  const bool has_scale = spec.has_input(1), has_bias = spec.has_input(2);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    spec.request_workspace(workspace_bytes<C>(g, rows, maps));
    return [=](const KernelArgs& args) {
      const GroupWorkspace<C> work(args, g, rows, maps);
      const T* x = args.input<T>(0);
      launch_unit_sums<MomentSums<T>, T>(args.stream, {x}, g.rows(), rows, work.moments);
      launch(finish_groups<T>, warp_per_unit(g.rows().units), args.stream, g, rows, work.moments,
             has_scale ? args.input<T>(1) : nullptr, has_bias ? args.input<T>(2) : nullptr,
             work.means, work.inv_std, work.affine);
      launch_affine<T>(args.stream, g.maps(), work.affine, static_cast<const T*>(nullptr), x,
                       args.output<T>(0));
    };
  });
}

// --- gradient: with g = dy scale and h = (x - mean) inv_std:
//   dx = inv_std (g - mean(g) - h mean(g h)), dscale = sum(dy h), dbias = sum(dy) per channel

template <class T>
__global__ void __launch_bounds__(128)
    finish_group_gradients(Groups g, UnitPlan p, const TwoSums<ComputeType<T>>* partial,
                           const T* scale, const ComputeType<T>* means,
                           const ComputeType<T>* inv_std, ComputeType<T>* map_sums,
                           Affine<ComputeType<T>>* affine) {
  using C = ComputeType<T>;
  const int64_t row = unit_of_warp();
  if (row >= g.rows().units) return;
  const C r = inv_std[row], mean = means[row];
  const C count = static_cast<C>(g.per_group * g.space);
  const int64_t image = row / g.groups, first = row % g.groups * g.per_group;
  TwoSums<C> total{0, 0};
  for (int64_t k = 0; k < g.per_group; ++k) {
    const TwoSums<C> sums =
        join_parts(partial, g.maps(), p, row * g.per_group + k, TwoSums<C>{0, 0}, AddBoth());
    const C by = scale == nullptr ? C{1} : static_cast<C>(scale[first + k]);
    total.first += by * sums.first;
    total.second += by * sums.second * r;
    if (lane() == 0) {
      map_sums[(image * 2 + 0) * g.channels() + first + k] = sums.second * r;
      map_sums[(image * 2 + 1) * g.channels() + first + k] = sums.first;
    }
  }
  for (int64_t k = lane(); k < g.per_group; k += kWarpSize) {
    const C by = scale == nullptr ? C{1} : static_cast<C>(scale[first + k]);
    affine[row * g.per_group + k] = {mean, r * by, -r * r * total.second / count,
                                     -r * total.first / count};
  }
}

// Inputs dy, x, scale; outputs dx, dscale, dbias.
template <bool kInstance>
KernelFn make_backward(NodeSpec& spec) {
  const Groups g(spec, 1, kInstance);
  const UnitPlan rows(g.rows()), maps(g.maps());
  const bool has_scale = spec.has_input(2), has_dx = spec.has_output(0);
  const bool has_dscale = spec.has_output(1), has_dbias = spec.has_output(2);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    spec.request_workspace(workspace_bytes<C>(g, rows, maps));
    return [=](const KernelArgs& args) {
      const GroupWorkspace<C> work(args, g, rows, maps);
      const T *dy = args.input<T>(0), *x = args.input<T>(1);
      const T* scale = has_scale ? args.input<T>(2) : nullptr;
      launch_unit_sums<MomentSums<T>, T>(args.stream, {x}, g.rows(), rows, work.moments);
      launch(finish_groups<T>, warp_per_unit(g.rows().units), args.stream, g, rows, work.moments,
             static_cast<const T*>(nullptr), static_cast<const T*>(nullptr), work.means,
             work.inv_std, static_cast<Affine<C>*>(nullptr));
      launch_unit_sums<GradientSums<T>, T>(args.stream, {dy, x, work.means, g.per_group}, g.maps(),
                                           maps, work.sums);
      launch(finish_group_gradients<T>, warp_per_unit(g.rows().units), args.stream, g, maps,
             work.sums, scale, work.means, work.inv_std, work.map_sums, work.affine);
      if (has_dx) launch_affine<T>(args.stream, g.maps(), work.affine, dy, x, args.output<T>(0));
      if (!has_dscale && !has_dbias) return;
      DeviceArray<T*, 2> out;
      out[0] = has_dscale ? args.output<T>(1) : nullptr;
      out[1] = has_dbias ? args.output<T>(2) : nullptr;
      launch_sum_parts<T, 2>(args.stream, work.map_sums, g.batch, g.channels(), out);
    };
  });
}

template <size_t kInput, bool kInstance>
std::optional<std::string> why_not(const NodeSpec& spec) {
  const Groups g(spec, kInput, kInstance);
  if (auto why = too_many_units(g.rows())) return why;
  return too_many_units(g.maps());
}

}  // namespace

void register_group_norm(KernelRegistry& registry) {
  registry.add("GroupNormalization", {{.name = "units",
                                       .why_not = why_not<0, false>,
                                       .make = make_forward<false>,
                                       .inplace = {{0, 0}}}});
  registry.add("InstanceNormalization", {{.name = "units",
                                          .why_not = why_not<0, true>,
                                          .make = make_forward<true>,
                                          .inplace = {{0, 0}}}});
  // All sums are made before dx, which may lie where dy or x is, is written.
  registry.add("ortrain::GroupNormalizationGrad", {{.name = "units",
                                                    .why_not = why_not<1, false>,
                                                    .make = make_backward<false>,
                                                    .inplace = {{0, 0}, {1, 0}}}});
  registry.add("ortrain::InstanceNormGrad", {{.name = "units",
                                              .why_not = why_not<1, true>,
                                              .make = make_backward<true>,
                                              .inplace = {{0, 0}, {1, 0}}}});
}

}  // namespace ortrain::gpu
