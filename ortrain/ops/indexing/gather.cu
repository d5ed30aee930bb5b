// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/axis_split.h"
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/index_lists.h"
#include "ortrain/gpu/strided_copy.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// Data as [outer, extent, inner], the result as [outer, indices, inner].
struct GatherShape {
  int64_t axis, outer, extent, inner, indices;

  GatherShape(const Dims& data, int64_t given_axis, int64_t count)
      : axis(normalize_axis(given_axis, data.size())), indices(count) {
    const AxisSplit split(data, axis);
    outer = split.outer;
    extent = split.size;
    inner = split.inner;
  }
};

template <class I, int kWord, class Index>
__global__ void __launch_bounds__(kItemThreads)
    gather(GatherShape s, Divider inner, Divider indices_divider, int64_t count,
           FaultReporter faults, const void* data_address, const I* indices, void* out_address) {
  using Word = typename WordOf<kWord>::type;
  const Word* data = static_cast<const Word*>(data_address);
  Word* out = static_cast<Word*>(out_address);
  for_each_item(count, [&](int64_t i) {
    const Index slice = inner.divide(static_cast<Index>(i));
    const Index outer = indices_divider.divide(slice);
    const int64_t position = slice - outer * static_cast<Index>(s.indices);
    int64_t index = indices[position];
    faults.wrap_index(index, position, s.extent, s.axis);
    const int64_t row = static_cast<int64_t>(outer) * s.extent + index;
    out[i] = data[row * inner.divisor + (i - static_cast<int64_t>(slice) * inner.divisor)];
  });
}

// Indices are wrong or not also where there is nothing to move.
template <class I>
__global__ void __launch_bounds__(kItemThreads)
    check_indices(GatherShape s, FaultReporter faults, const I* indices) {
  for_each_item(s.indices, [&](int64_t i) {
    int64_t index = indices[i];
    faults.wrap_index(index, i, s.extent, s.axis);
  });
}

template <class I>
__global__ void __launch_bounds__(kItemThreads)
    find_targets(GatherShape s, FaultReporter faults, const I* indices, TargetSink sink) {
  for_each_item(s.indices, [&](int64_t i) {
    int64_t index = indices[i];
    const bool good = faults.wrap_index(index, i, s.extent, s.axis);
    sink.put(i, good ? index : -1);
  });
}

template <class I>
KernelFn only_checks(const GatherShape& s) {
  return [s](const KernelArgs& args) {
    launch(check_indices<I>, items(s.indices), args.stream, s, FaultReporter(args),
           args.input<I>(1));
  };
}

template <class I>
KernelFn gather_of(NodeSpec& spec, const GatherShape& s) {
  if (spec.output(0).numel() == 0 || s.extent == 0) return only_checks<I>(s);
  const int64_t bytes = s.inner * static_cast<int64_t>(size_of(spec.input(0).dtype));
  return [s, bytes, total = static_cast<int64_t>(spec.output(0).bytes())](const KernelArgs& args) {
    const int word =
        word_of_address(args.in[0], word_of_address(args.out[0], common_word({bytes})));
    const int64_t count = total / word;
    dispatch_width(count, [&](auto index) {
      dispatch_word(word, [&](auto size) {
        launch(gather<I, decltype(size)::value, decltype(index)>, items(count), args.stream, s,
               Divider(bytes / word), Divider(s.indices), count, FaultReporter(args), args.in[0],
               args.input<I>(1), args.out[0]);
      });
    });
  };
}

KernelFn make_gather(NodeSpec& spec) {
  const GatherShape s(spec.input(0).dims, spec.attrs().int_("axis"), spec.input(1).numel());
  return dispatch_index(spec.input(1).dtype,
                        [&](auto tag) { return gather_of<typename decltype(tag)::type>(spec, s); });
}

GatherShape grad_shape(const NodeSpec& spec) {
  return {spec.output(0).dims, spec.attrs().int_("axis"), spec.input(1).numel()};
}

template <class I>
KernelFn gather_grad_of(NodeSpec& spec, const GatherShape& s) {
  if (spec.output(0).numel() == 0) return only_checks<I>(s);
  const JoinByIndex join(spec.output(0).dtype, {s.outer, s.indices, s.extent, s.inner});
  spec.request_workspace(join.workspace_bytes());
  return [=](const KernelArgs& args) {
    const TargetSink sink = join.begin(args.workspace, args.stream);
    launch(find_targets<I>, items(s.indices), args.stream, s, FaultReporter(args), args.input<I>(1),
           sink);
    join.finish(Reduction::add, nullptr, args.in[0], args.out[0], args.workspace, args.stream);
  };
}

KernelFn make_gather_grad(NodeSpec& spec) {
  const GatherShape s = grad_shape(spec);
  return dispatch_index(spec.input(1).dtype, [&](auto tag) {
    return gather_grad_of<typename decltype(tag)::type>(spec, s);
  });
}

std::optional<std::string> refuse_gather_grad(const NodeSpec& spec) {
  const GatherShape s = grad_shape(spec);
  return JoinByIndex::refusal(s.indices, s.extent);
}

}  // namespace

void register_gather(KernelRegistry& registry) {
  registry.add("Gather", {{.name = "slices", .make = make_gather}});
  registry.add("ortrain::GatherGrad",
               {{.name = "lists", .why_not = refuse_gather_grad, .make = make_gather_grad}});
}

}  // namespace ortrain::gpu
