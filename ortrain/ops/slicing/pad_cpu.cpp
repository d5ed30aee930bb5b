// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <numeric>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/odometer.h"
#include "ortrain/cpu/strided_copy.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// Elements put on in front of each axis (negative: taken off).
Dims front_pads(const NodeSpec& spec, size_t rank, size_t pads_input) {
  const std::optional<std::vector<int64_t>> pads = spec.constant_ints(pads_input);
  check(pads.has_value(), "pads are known when a kernel is made");
  std::vector<int64_t> axes(rank);
  std::iota(axes.begin(), axes.end(), 0);
  const size_t axes_input = 3;
  if (spec.has_input(axes_input)) {
    const std::optional<std::vector<int64_t>> given = spec.constant_ints(axes_input);
    check(given.has_value(), "axes are known when a kernel is made");
    axes = *given;
  }
  Dims front(rank, 0);
  for (size_t i = 0; i < axes.size(); ++i) {
    front[static_cast<size_t>(normalize_axis(axes[i], rank))] = (*pads)[i];
  }
  return front;
}

enum class PadMode { kReflect, kEdge, kWrap };

PadMode pad_mode(const NodeSpec& spec) {
  const std::string& mode = spec.attrs().string_("mode");
  return mode == "edge" ? PadMode::kEdge : mode == "wrap" ? PadMode::kWrap : PadMode::kReflect;
}

// The element of [0, extent) that place `at` of the axis, which may lie outside, is a copy of.
int64_t source_of(int64_t at, int64_t extent, PadMode mode) {
  if (at >= 0 && at < extent) return at;  // without the divisions below
  if (mode == PadMode::kEdge) return std::clamp<int64_t>(at, 0, extent - 1);
  if (mode == PadMode::kWrap) return (at % extent + extent) % extent;
  if (extent == 1) return 0;
  const int64_t period = 2 * (extent - 1);
  const int64_t phase = (at % period + period) % period;
  return phase < extent ? phase : period - phase;
}

KernelFn make_pad_constant(NodeSpec& spec) {
  const Dims& from = spec.input(0).dims;
  const Dims& to = spec.output(0).dims;
  const Dims front = front_pads(spec, from.size(), 1);
  const Dims in = strides_of(from);
  const Dims out = strides_of(to);
  // The box that both tensors share.
  Dims dims;
  int64_t in_offset = 0, out_offset = 0;
  for (size_t k = 0; k < from.size(); ++k) {
    const int64_t in_start = std::max<int64_t>(-front[k], 0);
    const int64_t out_start = std::max<int64_t>(front[k], 0);
    dims.push_back(std::max<int64_t>(std::min(from[k] - in_start, to[k] - out_start), 0));
  }
  // An empty box may lie anywhere, also beyond int64.
  for (size_t k = 0; num_elements(dims) > 0 && k < from.size(); ++k) {
    in_offset += std::max<int64_t>(-front[k], 0) * in[k];
    out_offset += std::max<int64_t>(front[k], 0) * out[k];
  }
  const size_t size = size_of(spec.input(0).dtype);
  const int64_t total = spec.output(0).numel();
  const bool covers_all = num_elements(dims) == total;
  const bool has_value = spec.has_input(2);
  StridedCopy copy(size, std::move(dims), in, out, in_offset, out_offset);
  return [=, copy = std::move(copy)](const KernelArgs& args) {
    const uint64_t zero = 0;
    if (!covers_all) fill_elements(args.out[0], total, size, has_value ? args.in[2] : &zero);
    copy.run(args.in[0], args.out[0]);
  };
}

// Rows of the last axis: the part that lies inside is copied, the rest looked up. Sources are
// computed when the kernel runs: tables of them would take more memory than small elements do.
struct PaddedRows {
  Dims from, front, strides;  // strides of `from`
  PadMode mode;
  Dims row_dims;  // of the output, without the last axis
  int64_t columns = 0;
  int64_t inside_begin = 0;  // elements [inside_begin, inside_begin + inside_count) are a copy of
  int64_t inside_count = 0;  // as many neighbours

  // Where the row lies that the row at `place` is a copy of.
  int64_t row_source(const Odometer& place) const {
    int64_t offset = 0;
    for (size_t k = 0; k < row_dims.size(); ++k) {
      offset += source_of(place.index(k) - front[k], from[k], mode) * strides[k];
    }
    return offset;
  }
  int64_t source(int64_t i) const { return source_of(i - front.back(), from.back(), mode); }
};

PaddedRows padded_rows(const Dims& from, const Dims& to, const Dims& front, PadMode mode) {
  Odometer::check_rank(to.size());
  PaddedRows result{.from = from,
                    .front = front,
                    .strides = strides_of(from),
                    .mode = mode,
                    .row_dims = Dims(to.begin(), to.end() - 1),
                    .columns = to.back()};
  result.inside_begin = std::clamp<int64_t>(front.back(), 0, to.back());
  const int64_t inside_end = std::clamp<int64_t>(front.back() + from.back(), 0, to.back());
  result.inside_count = std::max<int64_t>(inside_end - result.inside_begin, 0);
  return result;
}

template <size_t kSize>
void pad_row(const std::byte* in, std::byte* out, const PaddedRows& rows, int64_t begin,
             int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    std::memcpy(out + static_cast<size_t>(i) * kSize,
                in + static_cast<size_t>(rows.source(i)) * kSize, kSize);
  }
}

template <size_t kSize>
KernelFn pad_mapped(PaddedRows rows) {
  return [rows = std::move(rows)](const KernelArgs& args) {
    const std::byte* in = args.input<std::byte>(0);
    std::byte* out = args.output<std::byte>(0);
    const int64_t columns = rows.columns;
    parallel_for(
        num_elements(rows.row_dims), 16384 / std::max<int64_t>(columns, 1) + 1,
        [&](int64_t begin, int64_t end) {
          Odometer place(rows.row_dims, rows.strides, begin);
          for (int64_t r = begin; r < end; ++r, place.next()) {
            const std::byte* from = in + static_cast<size_t>(rows.row_source(place)) * kSize;
            std::byte* to = out + static_cast<size_t>(r * columns) * kSize;
            const int64_t inside_end = rows.inside_begin + rows.inside_count;
            pad_row<kSize>(from, to, rows, 0, rows.inside_begin);
            if (rows.inside_count > 0) {
              std::memcpy(to + static_cast<size_t>(rows.inside_begin) * kSize,
                          from + static_cast<size_t>(rows.source(rows.inside_begin)) * kSize,
                          static_cast<size_t>(rows.inside_count) * kSize);
            }
            pad_row<kSize>(from, to, rows, inside_end, columns);
          }
        });
  };
}

KernelFn make_pad(NodeSpec& spec) {
  const std::string& mode = spec.attrs().string_("mode");
  if (mode == "constant" || spec.input(0).rank() == 0) return make_pad_constant(spec);
  if (spec.output(0).numel() == 0) return [](const KernelArgs&) {};
  const Dims front = front_pads(spec, spec.input(0).dims.size(), 1);
  PaddedRows rows = padded_rows(spec.input(0).dims, spec.output(0).dims, front, pad_mode(spec));
  switch (size_of(spec.input(0).dtype)) {
    case 1:
      return pad_mapped<1>(std::move(rows));
    case 2:
      return pad_mapped<2>(std::move(rows));
    case 4:
      return pad_mapped<4>(std::move(rows));
    default:
      return pad_mapped<8>(std::move(rows));
  }
}

// For one axis: the places that each element was copied to, list after list.
struct Targets {
  std::vector<int64_t> starts;  // extent + 1; none where each element stays at its place
  std::vector<int64_t> places;

  Targets() = default;
  Targets(int64_t inner, int64_t outer, int64_t front, PadMode mode)
      : starts(static_cast<size_t>(inner) + 1, 0), places(static_cast<size_t>(outer)) {
    const auto source = [&](int64_t i) {
      return static_cast<size_t>(source_of(i - front, inner, mode));
    };
    for (int64_t i = 0; i < outer; ++i) ++starts[source(i) + 1];
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    std::vector<int64_t> next = starts;
    for (int64_t i = 0; i < outer; ++i) places[static_cast<size_t>(next[source(i)]++)] = i;
  }
};

template <typename T>
struct PadGradient {
  Dims dims;  // of dx
  Dims dy_strides;
  std::vector<Targets> targets;

  // The sum of dy over the copies of one element: a loop nest over the targets of each axis.
  ComputeType<T> sum(const T* dy, const int64_t* index, size_t axis) const {
    const Targets& list = targets[axis];
    const auto place = static_cast<size_t>(index[axis]);
    const bool stays = list.starts.empty();
    const int64_t begin = stays ? index[axis] : list.starts[place];
    const int64_t end = stays ? index[axis] + 1 : list.starts[place + 1];
    ComputeType<T> total = 0;
    for (int64_t i = begin; i < end; ++i) {
      const T* at = dy + (stays ? i : list.places[static_cast<size_t>(i)]) * dy_strides[axis];
      total +=
          axis + 1 == dims.size() ? static_cast<ComputeType<T>>(*at) : sum(at, index, axis + 1);
    }
    return total;
  }
};

// The tables of an axis are made while the plan is; longer ones would be gigabytes.
constexpr int64_t kMostTargets = int64_t{1} << 26;

template <typename T>
KernelFn pad_grad_of(NodeSpec& spec, const Dims& front) {
  PadGradient<T> gradient{spec.output(0).dims, strides_of(spec.input(0).dims), {}};
  for (size_t k = 0; k < front.size(); ++k) {
    const int64_t inner = gradient.dims[k], outer = spec.input(0).dims[k];
    if (front[k] == 0 && inner == outer) {
      gradient.targets.emplace_back();
      continue;
    }
    if (std::max(inner, outer) > kMostTargets) {
      throw UnsupportedError(str("the gradient of padding from ", inner, " to ", outer,
                                 "; extents up to ", kMostTargets, " are supported"));
    }
    gradient.targets.emplace_back(inner, outer, front[k], pad_mode(spec));
  }
  return [gradient = std::move(gradient), total = spec.output(0).numel()](const KernelArgs& args) {
    const T* dy = args.input<T>(0);
    T* dx = args.output<T>(0);
    parallel_for(total, 8192, [&](int64_t begin, int64_t end) {
      int64_t index[kMaxRank];
      int64_t rest = begin;
      for (size_t k = gradient.dims.size(); k-- > 0;) {
        index[k] = rest % gradient.dims[k];
        rest /= gradient.dims[k];
      }
      for (int64_t i = begin; i < end; ++i) {
        dx[i] = static_cast<T>(gradient.sum(dy, index, 0));
        for (size_t k = gradient.dims.size(); k-- > 0;) {
          if (++index[k] < gradient.dims[k]) break;
          index[k] = 0;
        }
      }
    });
  };
}

KernelFn make_pad_grad(NodeSpec& spec) {
  const size_t rank = spec.output(0).dims.size();
  if (rank > kMaxRank) throw UnsupportedError(str("rank ", rank, " is above ", kMaxRank));
  const std::string& mode = spec.attrs().string_("mode");
  if (mode == "constant") {
    throw UnsupportedError("the gradient of constant padding is Pad with negative pads");
  }
  if (rank == 0) {
    return [bytes = spec.output(0).bytes()](const KernelArgs& args) {
      std::memcpy(args.out[0], args.in[0], bytes);
    };
  }
  if (spec.input(0).numel() == 0) {
    return [bytes = spec.output(0).bytes()](const KernelArgs& args) {
      if (bytes != 0) std::memset(args.out[0], 0, bytes);
    };
  }
  const Dims front = front_pads(spec, rank, 2);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) {
    return pad_grad_of<typename decltype(tag)::type>(spec, front);
  });
}

}  // namespace

void register_pad(KernelRegistry& registry);
void register_pad(KernelRegistry& registry) {
  registry.add("Pad", {{.name = "ref", .make = make_pad}});
  registry.add("ortrain::PadGrad", {{.name = "ref", .make = make_pad_grad}});
}

}  // namespace ortrain::cpu
