// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/index_check.h"
#include "ortrain/cpu/odometer.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

enum class Reduction { none, add, mul, max, min };

Reduction reduction_of(const NodeSpec& spec) {
  const std::string& name = spec.attrs().string_("reduction");
  if (name == "add") return Reduction::add;
  if (name == "mul") return Reduction::mul;
  if (name == "max") return Reduction::max;
  if (name == "min") return Reduction::min;
  return Reduction::none;
}

// NaN wins a maximum or minimum; integers wrap.
template <typename T>
T combine(Reduction reduction, T old_value, T update) {
  using C = ComputeType<T>;
  const C a = static_cast<C>(old_value);
  const C b = static_cast<C>(update);
  switch (reduction) {
    case Reduction::none:
      return update;
    case Reduction::add:
      if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
        return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
      } else {
        return static_cast<T>(a + b);
      }
    case Reduction::mul:
      if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
        return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
      } else {
        return static_cast<T>(a * b);
      }
    case Reduction::max:
      return b > a || b != b ? update : old_value;
    case Reduction::min:
      return b < a || b != b ? update : old_value;
  }
  return update;
}

// A tensor of the shape of `indices`, read along lines of the axis. Lines differ in the other
// coordinates, so two threads never meet in one element of the data. Where the axis is not the last
// one, lines that lie beside each other are read together.
struct Lines {
  Dims dims;  // of indices: neither the axis nor `width`
  Dims index_strides, data_strides;
  int64_t groups = 1;  // of lines
  int64_t width = 1;   // lines beside each other in a group
  int64_t length = 0;  // along the axis
  int64_t index_step = 0, data_step = 0;
  int64_t axis = 0, extent = 0;  // of data
};

Lines make_lines(const Dims& data, const Dims& indices, int64_t axis) {
  Lines lines;
  lines.axis = normalize_axis(axis, data.size());
  const Dims data_strides = strides_of(data);
  const Dims index_strides = strides_of(indices);
  for (size_t k = 0; k < data.size(); ++k) {
    if (static_cast<int64_t>(k) == lines.axis) {
      lines.length = indices[k];
      lines.index_step = index_strides[k];
      lines.data_step = data_strides[k];
      lines.extent = data[k];
    } else if (k + 1 == data.size()) {
      lines.width = indices[k];
    } else {
      lines.dims.push_back(indices[k]);
      lines.index_strides.push_back(index_strides[k]);
      lines.data_strides.push_back(data_strides[k]);
    }
  }
  lines.groups = num_elements(lines.dims);
  Odometer::check_rank(lines.dims.size());
  return lines;
}

// Lines that a thread reads together: their indices fill whole cache lines.
constexpr int64_t kBeside = 64;

// body(position in indices, position in data) for every index, in order along each line.
template <typename I, typename Body>
void for_each_index(const Lines& lines, const I* indices, const Body& body) {
  if (lines.groups == 0 || lines.length == 0 || lines.width == 0) return;
  const int64_t blocks = (lines.width + kBeside - 1) / kBeside;
  const int64_t beside = std::min(lines.width, kBeside);
  const auto read = [&](int64_t at, int64_t source, int64_t width) {
    for (int64_t j = 0; j < lines.length; ++j, at += lines.index_step) {
      for (int64_t c = 0; c < width; ++c) {
        body(at + c, source + wrapped(indices[at + c], lines.extent) * lines.data_step + c);
      }
    }
  };
  parallel_for(lines.groups * blocks, 8192 / (lines.length * beside) + 1,
               [&](int64_t begin, int64_t end) {
                 Odometer index_line(lines.dims, lines.index_strides, begin / blocks);
                 Odometer data_line(lines.dims, lines.data_strides, begin / blocks);
                 for (int64_t unit = begin; unit < end; ++unit) {
                   const int64_t first = unit % blocks * kBeside;
                   read(index_line.offset() + first, data_line.offset() + first,
                        std::min(kBeside, lines.width - first));
                   if (first + kBeside >= lines.width) {
                     index_line.next();
                     data_line.next();
                   }
                 }
               });
}

template <typename I, size_t kSize>
KernelFn gather_elements_of(const NodeSpec& spec, Lines lines) {
  return [lines = std::move(lines), count = spec.input(1).numel(),
          context = spec.context()](const KernelArgs& args) {
    const std::byte* data = args.input<std::byte>(0);
    std::byte* out = args.output<std::byte>(0);
    check_indices(args.input<I>(1), count, lines.extent, lines.axis, context);
    for_each_index(lines, args.input<I>(1), [&](int64_t at, int64_t source) {
      std::memcpy(out + static_cast<size_t>(at) * kSize, data + static_cast<size_t>(source) * kSize,
                  kSize);
    });
  };
}

KernelFn make_gather_elements(NodeSpec& spec) {
  Lines lines = make_lines(spec.input(0).dims, spec.input(1).dims, spec.attrs().int_("axis"));
  return dispatch_index(spec.input(1).dtype, [&](auto tag) -> KernelFn {
    using I = typename decltype(tag)::type;
    switch (size_of(spec.input(0).dtype)) {
      case 1:
        return gather_elements_of<I, 1>(spec, std::move(lines));
      case 2:
        return gather_elements_of<I, 2>(spec, std::move(lines));
      case 4:
        return gather_elements_of<I, 4>(spec, std::move(lines));
      default:
        return gather_elements_of<I, 8>(spec, std::move(lines));
    }
  });
}

void copy_base(const KernelArgs& args, size_t bytes) {
  if (bytes != 0 && args.out[0] != args.in[0]) std::memcpy(args.out[0], args.in[0], bytes);
}

template <typename T, typename I>
KernelFn scatter_elements_of(const NodeSpec& spec, Lines lines) {
  return [lines = std::move(lines), count = spec.input(1).numel(), bytes = spec.output(0).bytes(),
          reduction = reduction_of(spec), context = spec.context()](const KernelArgs& args) {
    check_indices(args.input<I>(1), count, lines.extent, lines.axis, context);
    copy_base(args, bytes);
    const T* updates = args.input<T>(2);
    T* out = args.output<T>(0);
    for_each_index(lines, args.input<I>(1), [&](int64_t at, int64_t target) {
      out[target] = combine(reduction, out[target], updates[at]);
    });
  };
}

KernelFn make_scatter_elements(NodeSpec& spec) {
  Lines lines = make_lines(spec.input(0).dims, spec.input(1).dims, spec.attrs().int_("axis"));
  return dispatch_all(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    if (spec.input(1).dtype == DType::i32) {
      return scatter_elements_of<T, int32_t>(spec, std::move(lines));
    }
    return scatter_elements_of<T, int64_t>(spec, std::move(lines));
  });
}

// Index tuples into data [batch..., indexed..., slice...].
struct Tuples {
  int64_t batches = 1, per_batch = 1;  // tuples per batch
  int64_t length = 0;                  // of a tuple
  Dims extents, strides;               // of the indexed axes; strides count slices
  int64_t first_axis = 0;
  int64_t batch_slices = 1;  // slices of data per batch
  int64_t slice = 1;         // elements
  int64_t count() const { return batches * per_batch; }
  int64_t targets() const { return batches * batch_slices; }
};

Tuples make_tuples(const Dims& data, const Dims& indices, int64_t batch_dims) {
  Tuples t;
  t.first_axis = batch_dims;
  t.length = indices.back();
  t.batches = num_elements(Dims(data.begin(), data.begin() + batch_dims));
  t.per_batch = num_elements(Dims(indices.begin() + batch_dims, indices.end() - 1));
  const auto slice_begin = data.begin() + batch_dims + t.length;
  t.extents = Dims(data.begin() + batch_dims, slice_begin);
  t.strides = strides_of(t.extents);
  t.batch_slices = num_elements(t.extents);
  t.slice = num_elements(Dims(slice_begin, data.end()));
  return t;
}

// The slice of data that each tuple points to; every index is checked.
void resolve_tuples(const Tuples& t, const int64_t* indices, int64_t* slices,
                    const std::string& context) {
  const size_t length = static_cast<size_t>(t.length);
  for (int64_t i = 0; i < t.count(); ++i) {
    int64_t slice = i / t.per_batch * t.batch_slices;
    for (size_t k = 0; k < length; ++k) {
      const int64_t at = i * t.length + static_cast<int64_t>(k);
      const int64_t index = indices[at];
      if (index < -t.extents[k] || index >= t.extents[k]) {
        throw_index_error(context, index, at, t.extents[k], t.first_axis + static_cast<int64_t>(k));
      }
      slice += wrapped(index, t.extents[k]) * t.strides[k];
    }
    slices[i] = slice;
  }
}

KernelFn make_gather_nd(NodeSpec& spec) {
  const Tuples t =
      make_tuples(spec.input(0).dims, spec.input(1).dims, spec.attrs().int_("batch_dims"));
  spec.request_workspace(bytes_of<int64_t>(t.count()));
  const size_t bytes = static_cast<size_t>(t.slice) * size_of(spec.input(0).dtype);
  return [t, bytes, context = spec.context()](const KernelArgs& args) {
    int64_t* slices = static_cast<int64_t*>(args.workspace);
    resolve_tuples(t, args.input<int64_t>(1), slices, context);
    if (bytes == 0) return;
    const std::byte* data = args.input<std::byte>(0);
    std::byte* out = args.output<std::byte>(0);
    parallel_for(t.count(), 65536 / static_cast<int64_t>(bytes) + 1,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     std::memcpy(out + static_cast<size_t>(i) * bytes,
                                 data + static_cast<size_t>(slices[i]) * bytes, bytes);
                   }
                 });
  };
}

// Each range of targets is served by one thread, which applies the tuples in order.
template <typename T>
void apply_tuples(const Tuples& t, Reduction reduction, const int64_t* slices, const T* updates,
                  T* out) {
  if (t.count() == 0 || t.slice == 0) return;
  const int64_t work_per_target = t.slice * (1 + t.count() / t.targets());
  parallel_for(t.targets(), 65536 / work_per_target + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < t.count(); ++i) {
      if (slices[i] < begin || slices[i] >= end) continue;
      T* to = out + slices[i] * t.slice;
      const T* from = updates + i * t.slice;
      for (int64_t j = 0; j < t.slice; ++j) to[j] = combine(reduction, to[j], from[j]);
    }
  });
}

template <typename T>
KernelFn scatter_nd_of(NodeSpec& spec) {
  const Tuples t = make_tuples(spec.input(0).dims, spec.input(1).dims, 0);
  spec.request_workspace(bytes_of<int64_t>(t.count()));
  return [t, bytes = spec.output(0).bytes(), reduction = reduction_of(spec),
          context = spec.context()](const KernelArgs& args) {
    int64_t* slices = static_cast<int64_t*>(args.workspace);
    resolve_tuples(t, args.input<int64_t>(1), slices, context);
    copy_base(args, bytes);
    apply_tuples(t, reduction, slices, args.input<T>(2), args.output<T>(0));
  };
}

KernelFn make_scatter_nd(NodeSpec& spec) {
  return dispatch_all(spec.input(0).dtype,
                      [&](auto tag) { return scatter_nd_of<typename decltype(tag)::type>(spec); });
}

template <typename T>
KernelFn gather_nd_grad_of(NodeSpec& spec) {
  const Tuples t =
      make_tuples(spec.output(0).dims, spec.input(1).dims, spec.attrs().int_("batch_dims"));
  spec.request_workspace(bytes_of<int64_t>(t.count()));
  return [t, bytes = spec.output(0).bytes(), context = spec.context()](const KernelArgs& args) {
    int64_t* slices = static_cast<int64_t*>(args.workspace);
    resolve_tuples(t, args.input<int64_t>(1), slices, context);
    if (bytes != 0) std::memset(args.out[0], 0, bytes);
    apply_tuples(t, Reduction::add, slices, args.input<T>(0), args.output<T>(0));
  };
}

KernelFn make_gather_nd_grad(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) {
    return gather_nd_grad_of<typename decltype(tag)::type>(spec);
  });
}

}  // namespace

void register_scatter(KernelRegistry& registry);
void register_scatter(KernelRegistry& registry) {
  registry.add("GatherElements", {{.name = "ref", .make = make_gather_elements}});
  registry.add("ScatterElements",
               {{.name = "ref", .make = make_scatter_elements, .inplace = {{0, 0}}}});
  registry.add("GatherND", {{.name = "ref", .make = make_gather_nd}});
  registry.add("ortrain::GatherNDGrad", {{.name = "ref", .make = make_gather_nd_grad}});
  registry.add("ScatterND", {{.name = "ref", .make = make_scatter_nd, .inplace = {{0, 0}}}});
}

}  // namespace ortrain::cpu
