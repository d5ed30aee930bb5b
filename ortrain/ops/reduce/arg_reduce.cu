// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/reduce/reduce_lines.cuh"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// NaN beats every number; among equals the first or last wins.
template <class T, bool kLargest>
struct ArgOp {
  using In = T;
  using Out = int64_t;
  using C = ComputeType<T>;
  struct State {
    int64_t index;  // -1: of no element
    C value;
  };
  bool last = false;

  ORTRAIN_DEVICE State none() const { return {-1, C{0}}; }
  ORTRAIN_DEVICE bool replaces(const State& x, const State& best) const {
    if (x.index < 0) return false;
    if (best.index < 0) return true;
    const bool x_is_nan = x.value != x.value, best_is_nan = best.value != best.value;
    if (x_is_nan != best_is_nan) return x_is_nan;
    if (x_is_nan || x.value == best.value) return (x.index > best.index) == last;
    return kLargest ? x.value > best.value : x.value < best.value;
  }
  ORTRAIN_DEVICE State operator()(const State& a, const State& b) const {
    return replaces(b, a) ? b : a;
  }
  ORTRAIN_DEVICE void add(State& state, C x, int64_t r) const {
    const State next{r, x};
    if (replaces(next, state)) state = next;
  }
  ORTRAIN_DEVICE int64_t finish(const State& state, int64_t) const { return state.index; }
};

template <bool kLargest>
KernelFn make_arg_reduce(NodeSpec& spec) {
  const Dims& dims = spec.input(0).dims;
  std::vector<bool> marks(dims.size(), false);
  marks[static_cast<size_t>(normalize_axis(spec.attrs().int_("axis"), dims.size()))] = true;
  const ReduceLayout layout = *reduce_layout(dims, marks);  // one axis: never too many changes
  const bool last = spec.attrs().int_("select_last_index") != 0;
  return dispatch_all(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, bool>) {
      throw DTypeError("no kernel for bool");
    } else {
      using Op = ArgOp<T, kLargest>;
      const ReduceLaunch<Op> run(Op{last}, layout);
      spec.request_workspace(run.workspace_bytes());
      return [run](const KernelArgs& args) {
        run(args, args.input<T>(0), args.output<int64_t>(0), args.workspace);
      };
    }
  });
}

}  // namespace

void register_arg_reduce(KernelRegistry& registry) {
  registry.add("ArgMax", {{.name = "lines", .make = make_arg_reduce<true>}});
  registry.add("ArgMin", {{.name = "lines", .make = make_arg_reduce<false>}});
}

}  // namespace ortrain::gpu
