// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <optional>
#include <string>

#include "ortrain/gpu/row_forms.h"

// Sums over the units of x as [batch, units, size]: the channels of batch normalization, with
// batch 1 the images' channels or groups. Two stages in an order that the shape alone decides.
namespace ortrain::gpu {

struct Units {
  int64_t batch, units, size;
  ORTRAIN_HOST_DEVICE int64_t count() const { return batch * size; }  // per unit
};

template <class C>
struct Moments {
  C count, mean, squares;  // squares: the sum of squared distances from the mean
  static ORTRAIN_DEVICE Moments none() { return {C{0}, C{0}, C{0}}; }
  ORTRAIN_DEVICE C variance() const { return count > C{0} ? squares / count : C{0}; }
};

// Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances.
struct JoinMoments {
  template <class C>
  ORTRAIN_DEVICE Moments<C> operator()(const Moments<C>& a, const Moments<C>& b) const {
    if (a.count == C{0}) return b;
    if (b.count == C{0}) return a;
    const C count = a.count + b.count, distance = b.mean - a.mean, share = b.count / count;
    return {count, a.mean + distance * share,
            a.squares + b.squares + distance * distance * a.count * share};
  }
};

// --- what is summed: open(unit), add<kWidth>(own, offset), close(own)

template <class T>
struct MomentSums {
  using C = ComputeType<T>;
  using State = Moments<C>;
  using Join = JoinMoments;
  struct Own {
    C count, pivot, sum, squares;
  };
  const T* x;

  bool aligned() const { return pack_aligned(x); }
  ORTRAIN_DEVICE Own open(int64_t) const { return {C{0}, C{0}, C{0}, C{0}}; }
  // Distances from the first value that the thread meets: a mean far from zero costs no digits.
  template <int kWidth>
  ORTRAIN_DEVICE void add(Own& own, int64_t at) const {
    const auto pack = load_pack<kWidth>(x + at);
    if (own.count == C{0}) own.pivot = static_cast<C>(pack[0]);
    own.count += C{kWidth};
    ORTRAIN_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const C distance = static_cast<C>(pack[i]) - own.pivot;
      own.sum += distance;
      own.squares += distance * distance;
    }
  }
  ORTRAIN_DEVICE State close(const Own& own) const {
    if (own.count == C{0}) return State::none();
    const C shift = own.sum / own.count, squares = own.squares - shift * own.sum;
    return {own.count, own.pivot + shift, squares < C{0} ? C{0} : squares};
  }
};

// sum(dy) and sum(dy (x - mean)); unit u has the mean at u / per_mean. dy null: zeros.
template <class T>
struct GradientSums {
  using C = ComputeType<T>;
  using State = TwoSums<C>;
  using Join = AddBoth;
  struct Own {
    C mean;
    State sums;
  };
  const T *dy, *x;
  const C* means;
  int64_t per_mean;

  bool aligned() const { return pack_aligned(dy, x); }
  ORTRAIN_DEVICE Own open(int64_t unit) const { return {means[unit / per_mean], {C{0}, C{0}}}; }
  template <int kWidth>
  ORTRAIN_DEVICE void add(Own& own, int64_t at) const {
    if (dy == nullptr) return;
    const auto gradient = load_pack<kWidth>(dy + at), value = load_pack<kWidth>(x + at);
    ORTRAIN_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const C g = gradient[i];
      own.sums.first += g;
      own.sums.second += g * (static_cast<C>(value[i]) - own.mean);
    }
  }
  ORTRAIN_DEVICE State close(const Own& own) const { return own.sums; }
};

// How the elements of a unit are shared out: [image_parts, size_parts] parts of it. `inner`: states
// per unit and part that lie side by side, as many as there are elements in a short run.
struct UnitPlan {
  static constexpr unsigned kThreads = 256;
  static constexpr int64_t kShortRun = 8;
  int64_t image_parts = 1, size_parts = 1, inner = 1;
  int across = 32;  // threads along a run; the others stand on other images

  explicit UnitPlan(const Units& u) {
    constexpr int64_t kWanted = 1024, kGrain = 4096;
    if (u.size < kShortRun) {
      inner = std::max<int64_t>(u.size, 1);
      const int64_t tiles = u.units * inner / kWarpSize + 1;
      image_parts = std::clamp<int64_t>(std::min(u.batch / 64, kWanted / tiles), 1, 64);
      return;
    }
    const int64_t parts = std::clamp<int64_t>(
        std::min(u.count() / kGrain, kWanted / std::max<int64_t>(u.units, 1)), 1, kWanted);
    image_parts = std::min(parts, std::max<int64_t>(u.batch, 1));
    size_parts = std::clamp<int64_t>(std::min(parts / image_parts, u.size / kGrain), 1, kWanted);
    while (across < static_cast<int>(kThreads) && across < u.size) across *= 2;
  }
  ORTRAIN_HOST_DEVICE int64_t parts() const { return image_parts * size_parts; }
  ORTRAIN_HOST_DEVICE int64_t states(const Units& u) const { return parts() * u.units * inner; }
};

template <class Sums, int kWidth>
__global__ void unit_sums(Sums sums, Units u, UnitPlan p, typename Sums::State* partial) {
  const int64_t unit = blockIdx.x, part = blockIdx.y;
  const int64_t image_part = part % p.image_parts, size_part = part / p.image_parts;
  // Whole packs.
  const int64_t packs = u.size / kWidth;
  const int64_t begin = packs * size_part / p.size_parts;
  const int64_t end = packs * (size_part + 1) / p.size_parts;
  const int64_t last = u.batch * (image_part + 1) / p.image_parts;
  const int column = static_cast<int>(threadIdx.x) % p.across;
  const int row = static_cast<int>(threadIdx.x) / p.across;
  auto own = sums.open(unit);
  for (int64_t n = u.batch * image_part / p.image_parts + row; n < last;
       n += static_cast<int>(blockDim.x) / p.across) {
    const int64_t start = (n * u.units + unit) * u.size;
    for (int64_t s = begin + column; s < end; s += p.across) {
      sums.template add<kWidth>(own, start + s * kWidth);
    }
  }
  // Without initializers, as states are.
  typename Sums::Own nothing = sums.open(unit);
  const auto state = block_merge(sums.close(own), sums.close(nothing), typename Sums::Join());
  if (threadIdx.x == 0) partial[part * u.units + unit] = state;
}

// Runs of a few elements: lanes on neighbouring elements of an image, warps on images.
template <class Sums>
__global__ void __launch_bounds__(256)
    unit_sums_of_columns(Sums sums, Units u, UnitPlan p, typename Sums::State* partial) {
  const int64_t columns = u.units * u.size, part = blockIdx.y;
  const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane();
  const int64_t last = u.batch * (part + 1) / p.image_parts;
  auto own = sums.open(column < columns ? column / u.size : 0);
  if (column < columns) {
    for (int64_t n = u.batch * part / p.image_parts + warp(); n < last;
         n += blockDim.x / kWarpSize) {
      sums.template add<1>(own, n * columns + column);
    }
  }
  const auto state = merge_warps(sums.close(own), typename Sums::Join());
  if (warp() == 0 && column < columns) partial[part * columns + column] = state;
}

// Why a launch cannot have the blocks that units, and short runs of them, take.
inline std::optional<std::string> too_many_units(const Units& u) {
  const int64_t sums = u.size < UnitPlan::kShortRun ? u.units * u.size / kWarpSize + 1 : u.units;
  if (has_blocks(std::max(sums, u.units / 4 + 1))) return std::nullopt;
  return str(u.units, " units of ", u.size, " elements");
}

template <class Sums, class T>
void launch_unit_sums(void* stream, const Sums& sums, const Units& u, const UnitPlan& p,
                      typename Sums::State* partial) {
  if (u.units == 0 || u.size == 0) return;
  if (u.size < UnitPlan::kShortRun) {
    launch(unit_sums_of_columns<Sums>,
           {.blocks = block_count((u.units * u.size + kWarpSize - 1) / kWarpSize),
            .threads = 8 * kWarpSize,
            .blocks_y = static_cast<unsigned>(p.image_parts)},
           stream, sums, u, p, partial);
    return;
  }
  const LaunchShape shape{.blocks = block_count(u.units),
                          .threads = UnitPlan::kThreads,
                          .blocks_y = static_cast<unsigned>(p.parts())};
  if (u.size % kPackWidth<T> == 0 && u.size >= 16 * kPackWidth<T> && sums.aligned()) {
    launch(unit_sums<Sums, kPackWidth<T>>, shape, stream, sums, u, p, partial);
  } else {
    launch(unit_sums<Sums, 1>, shape, stream, sums, u, p, partial);
  }
}

// The state of one unit: all lanes of a warp call it and get the same.
template <class State, class Join>
ORTRAIN_DEVICE State join_parts(const State* partial, const Units& u, const UnitPlan& p,
                                int64_t unit, State none, const Join& join) {
  const int64_t count = u.size == 0 ? 0 : p.parts() * p.inner;
  State state = none;
  for (int64_t i = lane(); i < count; i += kWarpSize) {
    const int64_t part = i / p.inner;
    state = join(state, partial[(part * u.units + unit) * p.inner + i % p.inner]);
  }
  return warp_merge(state, join);
}

// A warp per unit.
inline LaunchShape warp_per_unit(int64_t units) {
  return {.blocks = block_count((units + 3) / 4), .threads = 4 * kWarpSize};
}
ORTRAIN_DEVICE int64_t unit_of_warp() { return int64_t{blockIdx.x} * 4 + warp(); }

// --- what becomes of each element: dy factor + (x - mean) slope + shift

template <class C>
struct Affine {
  C mean, factor, slope, shift;
};

// dy and x may be null: their term is left out.
template <class T, int kWidth>
__global__ void __launch_bounds__(kItemThreads)
    apply_affine(Units u, const Affine<ComputeType<T>>* of, const T* dy, const T* x, T* out) {
  using C = ComputeType<T>;
  const int64_t run = u.size / kWidth, count = u.batch * u.units * run;
  const bool small = count <= std::numeric_limits<int32_t>::max();
  for_each_item(count, [&](int64_t i) {
    const int64_t unit = small ? static_cast<uint32_t>(i) / static_cast<uint32_t>(run) %
                                     static_cast<uint32_t>(u.units)
                               : i / run % u.units;
    const Affine<C> a = of[unit];
    RowPack<C, kWidth> sum;
    ORTRAIN_UNROLL
    for (int k = 0; k < kWidth; ++k) sum[k] = a.shift;
    if (x != nullptr) {
      const auto value = load_pack<kWidth>(x + i * kWidth);
      ORTRAIN_UNROLL
      for (int k = 0; k < kWidth; ++k) {
        sum[k] = (static_cast<C>(value[k]) - a.mean) * a.slope + a.shift;
      }
    }
    if (dy != nullptr) {
      const auto gradient = load_pack<kWidth>(dy + i * kWidth);
      ORTRAIN_UNROLL
      for (int k = 0; k < kWidth; ++k) sum[k] += static_cast<C>(gradient[k]) * a.factor;
    }
    RowPack<T, kWidth> result;
    ORTRAIN_UNROLL
    for (int k = 0; k < kWidth; ++k) result[k] = static_cast<T>(sum[k]);
    store_pack<kWidth>(out + i * kWidth, result);
  });
}

template <class T>
void launch_affine(void* stream, const Units& u, const Affine<ComputeType<T>>* of, const T* dy,
                   const T* x, T* out) {
  const int64_t count = u.batch * u.units * u.size;
  if (u.size % kPackWidth<T> == 0 && pack_aligned(dy, x, out)) {
    launch(apply_affine<T, kPackWidth<T>>, items(count / kPackWidth<T>), stream, u, of, dy, x, out);
  } else {
    launch(apply_affine<T, 1>, items(count), stream, u, of, dy, x, out);
  }
}

}  // namespace ortrain::gpu
