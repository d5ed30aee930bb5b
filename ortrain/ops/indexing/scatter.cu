// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/index_lists.h"
#include "ortrain/gpu/strided_copy.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

Reduction reduction_of(const NodeSpec& spec) {
  const std::string& name = spec.attrs().string_("reduction");
  if (name == "add") return Reduction::add;
  if (name == "mul") return Reduction::mul;
  if (name == "max") return Reduction::max;
  if (name == "min") return Reduction::min;
  return Reduction::none;
}

// --- one index per element, along an axis

// A tensor of the shape of `indices`; its steps in the data, that of the axis left out.
struct Elements {
  CopyAxes axes;
  int64_t count, axis, extent, axis_step;

  Elements(const Dims& data, const Dims& indices, int64_t given_axis)
      : count(num_elements(indices)), axis(normalize_axis(given_axis, data.size())) {
    Dims strides = strides_of(data);
    const auto at = static_cast<size_t>(axis);
    extent = data[at];
    axis_step = strides[at];
    strides[at] = 0;
    axes = MergedAxes(indices, strides, strides_of(indices)).for_kernels();
  }

  // The element of data that `index` at `position` points to, -1 for a wrong one.
  template <class Index>
  ORTRAIN_DEVICE int64_t place(int64_t position, int64_t index, const FaultReporter& faults) const {
    if (!faults.wrap_index(index, position, extent, axis)) return -1;
    int64_t from = 0, to = 0;
    axes.locate(static_cast<Index>(position), from, to);
    return from + index * axis_step;
  }
};

Elements elements_of(const NodeSpec& spec) {
  return {spec.input(0).dims, spec.input(1).dims, spec.attrs().int_("axis")};
}

template <class I, int kSize, class Index>
__global__ void __launch_bounds__(kItemThreads)
    gather_elements(Elements e, FaultReporter faults, const void* data_address, const I* indices,
                    void* out_address) {
  using Word = typename WordOf<kSize>::type;
  const Word* data = static_cast<const Word*>(data_address);
  Word* out = static_cast<Word*>(out_address);
  for_each_item(e.count, [&](int64_t i) {
    const int64_t from = e.template place<Index>(i, indices[i], faults);
    out[i] = from >= 0 ? data[from] : static_cast<Word>(0);
  });
}

template <class I>
__global__ void __launch_bounds__(kItemThreads)
    element_targets(Elements e, FaultReporter faults, const I* indices, TargetSink sink) {
  for_each_item(e.count,
                [&](int64_t i) { sink.put(i, e.template place<uint32_t>(i, indices[i], faults)); });
}

KernelFn make_gather_elements(NodeSpec& spec) {
  return [e = elements_of(spec), type = spec.input(1).dtype,
          size = static_cast<int>(size_of(spec.input(0).dtype))](const KernelArgs& args) {
    dispatch_index(type, [&](auto tag) {
      using I = typename decltype(tag)::type;
      dispatch_width(e.count, [&](auto index) {
        using Index = std::remove_cvref_t<decltype(index)>;
        dispatch_word(size, [&](auto bytes) {
          constexpr int kSize = decltype(bytes)::value;
          if constexpr (kSize <= 8) {
            launch(gather_elements<I, kSize, Index>, items(e.count), args.stream, e,
                   FaultReporter(args), args.in[0], args.input<I>(1), args.out[0]);
          }
        });
      });
    });
  };
}

// --- index tuples into data [batch..., indexed..., slice...]

struct Tuples {
  static constexpr int kMostIndices = 16;
  int64_t count = 0, per_batch = 1, batch_slices = 1;
  int64_t batches = 1, slice = 1;
  int length = 0;
  int64_t first_axis = 0;
  int64_t extents[kMostIndices], strides[kMostIndices];

  Tuples(const Dims& data, const Dims& indices, int64_t batch_dims)
      : length(static_cast<int>(indices.back())), first_axis(batch_dims) {
    if (length > kMostIndices) {
      throw UnsupportedError(str("tuples of more than ", kMostIndices, " indices"));
    }
    const auto begin = data.begin() + batch_dims;
    batches = num_elements(Dims(data.begin(), begin));
    per_batch = num_elements(Dims(indices.begin() + batch_dims, indices.end() - 1));
    count = batches * per_batch;
    const Dims indexed(begin, begin + length);
    const Dims steps = strides_of(indexed);
    std::copy(indexed.begin(), indexed.end(), extents);
    std::copy(steps.begin(), steps.end(), strides);
    batch_slices = num_elements(indexed);
    slice = num_elements(Dims(begin + length, data.end()));
  }
  int64_t targets() const { return batches * batch_slices; }

  // The slice of data that tuple `i` points to, -1 for a wrong one.
  ORTRAIN_DEVICE int64_t place(int64_t i, const int64_t* indices,
                               const FaultReporter& faults) const {
    int64_t at = i / per_batch * batch_slices;
    bool good = true;
    for (int k = 0; k < length; ++k) {
      int64_t index = indices[i * length + k];
      good = faults.wrap_index(index, i * length + k, extents[k], first_axis + k) && good;
      at += index * strides[k];
    }
    return good ? at : -1;
  }
};

template <int kWord>
__global__ void __launch_bounds__(kItemThreads)
    gather_tuples(Tuples t, int64_t words, int64_t count, FaultReporter faults,
                  const void* data_address, const int64_t* indices, void* out_address) {
  using Word = typename WordOf<kWord>::type;
  const Word* data = static_cast<const Word*>(data_address);
  Word* out = static_cast<Word*>(out_address);
  for_each_item(count, [&](int64_t i) {
    const int64_t tuple = i / words;
    const int64_t from = t.place(tuple, indices, faults);
    if (from >= 0) out[i] = data[from * words + (i - tuple * words)];
  });
}

__global__ void __launch_bounds__(kItemThreads)
    tuple_targets(Tuples t, FaultReporter faults, const int64_t* indices, TargetSink sink) {
  for_each_item(t.count, [&](int64_t i) { sink.put(i, t.place(i, indices, faults)); });
}

__global__ void __launch_bounds__(kItemThreads)
    check_tuples(Tuples t, FaultReporter faults, const int64_t* indices) {
  for_each_item(t.count, [&](int64_t i) { t.place(i, indices, faults); });
}

KernelFn make_gather_nd(NodeSpec& spec) {
  const Tuples t(spec.input(0).dims, spec.input(1).dims, spec.attrs().int_("batch_dims"));
  const int64_t bytes = t.slice * static_cast<int64_t>(size_of(spec.input(0).dtype));
  return [t, bytes](const KernelArgs& args) {
    if (bytes == 0 || t.targets() == 0) {
      launch(check_tuples, items(t.count), args.stream, t, FaultReporter(args),
             args.input<int64_t>(1));
      return;
    }
    const int word =
        word_of_address(args.in[0], word_of_address(args.out[0], common_word({bytes})));
    const int64_t words = bytes / word;
    dispatch_word(word, [&](auto size) {
      launch(gather_tuples<decltype(size)::value>, items(t.count * words), args.stream, t, words,
             t.count * words, FaultReporter(args), args.in[0], args.input<int64_t>(1), args.out[0]);
    });
  };
}

// --- both: what the indices point to is found, then updates go there

// find(args, sink) launches the kernel that finds the targets.
template <class Find>
KernelFn scatter_by(NodeSpec& spec, const ListShape& shape, Reduction reduction, bool has_base,
                    size_t updates, const Find& find) {
  const LastPositions last(shape.positions, shape.targets);
  const JoinByIndex join(spec.output(0).dtype, shape);
  const bool overwrites = reduction == Reduction::none;
  spec.request_workspace(overwrites ? last.workspace_bytes() : join.workspace_bytes());
  const DType dtype = spec.output(0).dtype;
  return [=, bytes = static_cast<int64_t>(spec.output(0).bytes())](const KernelArgs& args) {
    const void* base = has_base ? args.in[0] : nullptr;
    if (overwrites) {
      const TargetSink sink = last.begin(args.workspace, args.stream);
      find(args, sink);
      copy_bytes(base, args.out[0], bytes, args.stream);
      apply_last(size_of(dtype), sink, shape, args.in[updates], args.out[0], args.stream);
      return;
    }
    find(args, join.begin(args.workspace, args.stream));
    join.finish(reduction, base, args.in[updates], args.out[0], args.workspace, args.stream);
  };
}

KernelFn make_scatter_elements(NodeSpec& spec) {
  const Elements e = elements_of(spec);
  return dispatch_index(spec.input(1).dtype, [&](auto tag) {
    using I = typename decltype(tag)::type;
    return scatter_by(spec, {1, e.count, spec.input(0).numel(), 1}, reduction_of(spec), true, 2,
                      [e](const KernelArgs& args, const TargetSink& sink) {
                        launch(element_targets<I>, items(e.count), args.stream, e,
                               FaultReporter(args), args.input<I>(1), sink);
                      });
  });
}

KernelFn scatter_tuples(NodeSpec& spec, const Tuples& t, Reduction reduction, bool has_base,
                        size_t updates) {
  return scatter_by(spec, {1, t.count, t.targets(), t.slice}, reduction, has_base, updates,
                    [t](const KernelArgs& args, const TargetSink& sink) {
                      launch(tuple_targets, items(t.count), args.stream, t, FaultReporter(args),
                             args.input<int64_t>(1), sink);
                    });
}

Tuples scatter_tuples_of(const NodeSpec& spec) {
  return {spec.input(0).dims, spec.input(1).dims, 0};
}
Tuples grad_tuples_of(const NodeSpec& spec) {
  return {spec.output(0).dims, spec.input(1).dims, spec.attrs().int_("batch_dims")};
}

void refuse_many(int64_t positions, int64_t targets) {
  if (const auto reason = JoinByIndex::refusal(positions, targets)) {
    throw UnsupportedError(*reason);
  }
}

}  // namespace

void register_scatter(KernelRegistry& registry) {
  Kernel kernel{.name = "elements"};
  kernel.why_not = [](const NodeSpec& spec) { return refusal_of([&] { elements_of(spec); }); };
  kernel.make = make_gather_elements;
  registry.add("GatherElements", {kernel});
  kernel.why_not = [](const NodeSpec& spec) {
    return refusal_of([&] { refuse_many(elements_of(spec).count, spec.input(0).numel()); });
  };
  kernel.make = make_scatter_elements;
  kernel.inplace = {{0, 0}};
  registry.add("ScatterElements", {kernel});

  Kernel tuples{.name = "tuples"};
  tuples.why_not = [](const NodeSpec& spec) {
    return refusal_of(
        [&] { Tuples(spec.input(0).dims, spec.input(1).dims, spec.attrs().int_("batch_dims")); });
  };
  tuples.make = make_gather_nd;
  registry.add("GatherND", {tuples});
  tuples.why_not = [](const NodeSpec& spec) {
    return refusal_of([&] {
      const Tuples t = grad_tuples_of(spec);
      refuse_many(t.count, t.targets());
    });
  };
  tuples.make = [](NodeSpec& spec) {
    return scatter_tuples(spec, grad_tuples_of(spec), Reduction::add, false, 0);
  };
  registry.add("ortrain::GatherNDGrad", {tuples});
  tuples.why_not = [](const NodeSpec& spec) {
    return refusal_of([&] {
      const Tuples t = scatter_tuples_of(spec);
      refuse_many(t.count, t.targets());
    });
  };
  tuples.make = [](NodeSpec& spec) {
    return scatter_tuples(spec, scatter_tuples_of(spec), reduction_of(spec), true, 2);
  };
  tuples.inplace = {{0, 0}};
  registry.add("ScatterND", {tuples});
}

}  // namespace ortrain::gpu
