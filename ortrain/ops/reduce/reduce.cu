// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include "ortrain/gpu/exponentials.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/ops/reduce/reduce_lines.cuh"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

enum class Kind { sum, sum_abs, sum_squares, product, maximum, minimum };
// What becomes of the reduced value r over n elements: r, r / n, sqrt(r), log(r).
enum class Finish { none, mean, sqrt, log };

// Floats add up in float or double, integers in 64 bits.
template <class T>
using Accumulator = std::conditional_t<!std::is_integral_v<T>, ComputeType<T>,
                                       std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

// Integer sums and products are meant modulo 2^64; signed overflow would be undefined.
template <class A>
ORTRAIN_DEVICE A wrapping_add(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}
template <class A>
ORTRAIN_DEVICE A wrapping_mul(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <class T, Kind kKind, class Result = T>
struct ReduceOp {
  using In = T;
  using Out = Result;
  using C = ComputeType<T>;
  using State = Accumulator<T>;
  Finish to_do = Finish::none;

  ORTRAIN_DEVICE State none() const {
    if constexpr (kKind == Kind::product) {
      return State{1};
    } else if constexpr (kKind != Kind::maximum && kKind != Kind::minimum) {
      return State{0};
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<State>(kKind == Kind::maximum ? std::numeric_limits<T>::lowest()
                                                       : std::numeric_limits<T>::max());
    } else {
      const State infinity = std::numeric_limits<State>::infinity();
      return kKind == Kind::maximum ? -infinity : infinity;
    }
  }
  ORTRAIN_DEVICE State operator()(State a, State b) const {
    if constexpr (kKind == Kind::product) {
      return wrapping_mul(a, b);
    } else if constexpr (kKind == Kind::maximum) {
      return b > a || b != b ? b : a;
    } else if constexpr (kKind == Kind::minimum) {
      return b < a || b != b ? b : a;
    } else {
      return wrapping_add(a, b);
    }
  }
  ORTRAIN_DEVICE void add(State& state, C x, int64_t) const {
    auto value = static_cast<State>(x);
    if constexpr (kKind == Kind::sum_abs && !std::is_unsigned_v<State>) {
      if (value < State{0}) value = wrapping_mul(value, static_cast<State>(-1));
    } else if constexpr (kKind == Kind::sum_squares) {
      value = wrapping_mul(value, value);
    }
    state = (*this)(state, value);
  }
  ORTRAIN_DEVICE Out finish(State value, int64_t count) const {
    if (to_do == Finish::mean) value = static_cast<State>(value / static_cast<State>(count));
    if constexpr (std::is_integral_v<T>) {
      if (to_do == Finish::sqrt) value = static_cast<State>(::sqrt(static_cast<double>(value)));
      if (to_do == Finish::log) value = static_cast<State>(::log(static_cast<double>(value)));
    } else {
      if (to_do == Finish::sqrt) value = static_cast<State>(::sqrt(value));
      if (to_do == Finish::log) value = static_cast<State>(::log(value));
    }
    return static_cast<Out>(value);
  }
};

// m + log(sum(exp(x - m))), m = max x; infinities as they are.
template <class T>
struct LogSumExpOp {
  using In = T;
  using Out = T;
  using C = ComputeType<T>;
  using State = ExponentialSum<C>;

  ORTRAIN_DEVICE State none() const { return State::none(); }
  ORTRAIN_DEVICE State operator()(const State& a, const State& b) const {
    return JoinExponentialSums()(a, b);
  }
  ORTRAIN_DEVICE void add(State& state, C x, int64_t) const {
    if (x == std::numeric_limits<C>::infinity()) {
      state.top = x;  // whatever the sum is, unless it is NaN
    } else {
      state.add(x);
    }
  }
  ORTRAIN_DEVICE T finish(const State& state, int64_t) const {
    const C infinity = std::numeric_limits<C>::infinity();
    const bool is_top = state.sum == state.sum && (state.top == infinity || state.top == -infinity);
    return static_cast<T>(is_top ? state.top : state.log_sum());
  }
};

std::vector<bool> mark(const std::vector<int64_t>& axes, size_t rank) {
  std::vector<bool> marks(rank, false);
  for (int64_t axis : axes) marks[static_cast<size_t>(axis)] = true;
  return marks;
}

std::optional<ReduceLayout> layout_of(const NodeSpec& spec) {
  const size_t rank = spec.input(0).dims.size();
  std::optional<std::vector<int64_t>> axes;
  if (spec.has_input(1)) {
    axes = spec.constant_ints(1);
    check(axes.has_value(), "axes are known when a kernel is made");
  }
  const bool none = !axes || axes->empty();
  const bool noop = none && spec.attrs().int_("noop_with_empty_axes") != 0;
  return reduce_layout(
      spec.input(0).dims,
      mark(noop ? std::vector<int64_t>() : normalize_axes_or_all(axes, rank), rank));
}

std::optional<std::string> why_not(const NodeSpec& spec) {
  if (layout_of(spec)) return std::nullopt;
  return str("kept and reduced axes change places more than ", ReduceLayout::kMost, " times");
}

template <class Op>
KernelFn make_with(NodeSpec& spec, Op op) {
  const ReduceLaunch<Op> run(op, *layout_of(spec));
  spec.request_workspace(run.workspace_bytes());
  return [run](const KernelArgs& args) {
    run(args, args.input<typename Op::In>(0), args.output<typename Op::Out>(0), args.workspace);
  };
}

template <Kind kKind>
constexpr bool takes(DType type) {
  const bool small = type == DType::i8 || type == DType::u8 || type == DType::boolean;
  return !small || kKind == Kind::maximum || kKind == Kind::minimum;
}

template <Kind kKind>
KernelFn make_reduce(NodeSpec& spec, Finish finish) {
  const ReduceLayout layout = *layout_of(spec);
  const DType type = spec.input(0).dtype;
  const bool divides = finish == Finish::mean || finish == Finish::log;
  if (layout.count == 0 && layout.outputs > 0 && divides && !is_float(type)) {
    throw ShapeError(str("nothing to reduce in ", tensor_spec_str(spec.input(0)),
                         ": the result has no integer value"));
  }
  const auto with = [&](auto tag) -> KernelFn {
    return make_with(spec, ReduceOp<typename decltype(tag)::type, kKind>{finish});
  };
  switch (type) {
    case DType::i32:
      return with(TypeTag<int32_t>{});
    case DType::i64:
      return with(TypeTag<int64_t>{});
    case DType::u32:
      return with(TypeTag<uint32_t>{});
    case DType::u64:
      return with(TypeTag<uint64_t>{});
    default:
      break;
  }
  if constexpr (kKind == Kind::maximum || kKind == Kind::minimum) {
    switch (type) {
      case DType::i8:
        return with(TypeTag<int8_t>{});
      case DType::u8:
        return with(TypeTag<uint8_t>{});
      case DType::boolean:
        return with(TypeTag<bool>{});
      default:
        break;
    }
  }
  return dispatch_float(type, with);
}

KernelFn make_wide_sum(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return make_with(spec, ReduceOp<T, Kind::sum, ComputeType<T>>());
  });
}

KernelFn make_log_sum_exp(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    return make_with(spec, LogSumExpOp<typename decltype(tag)::type>());
  });
}

// --- dx_i = dy times the product of the others: those before and those after, without division

template <class T>
__global__ void prod_grad(ReduceLayout a, const T* dy, const T* x, T* dx, double* after) {
  using C = ComputeType<T>;
  for_each_item(a.outputs, [&](int64_t o) {
    const int64_t start = a.start(o);
    double product = 1;
    for (int64_t r = a.count; r-- > 0;) {
      const int64_t at = start + a.step(r);
      after[at] = product;
      product *= static_cast<double>(static_cast<C>(x[at]));
    }
    product = static_cast<double>(static_cast<C>(dy[o]));
    for (int64_t r = 0; r < a.count; ++r) {
      const int64_t at = start + a.step(r);
      const auto value = static_cast<double>(static_cast<C>(x[at]));
      dx[at] = static_cast<T>(static_cast<C>(product * after[at]));
      product *= value;
    }
  });
}

std::optional<ReduceLayout> prod_grad_layout(const NodeSpec& spec) {
  const Dims& dims = spec.input(1).dims;
  return reduce_layout(dims,
                       mark(normalize_axes(spec.attrs().ints("axes"), dims.size()), dims.size()));
}

KernelFn make_prod_grad(NodeSpec& spec) {
  const ReduceLayout layout = *prod_grad_layout(spec);
  spec.request_workspace(bytes_of<double>(spec.input(1).numel()));
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [layout](const KernelArgs& args) {
      launch(prod_grad<T>, items(layout.outputs), args.stream, layout, args.input<T>(0),
             args.input<T>(1), args.output<T>(0), static_cast<double*>(args.workspace));
    };
  });
}

}  // namespace

void register_reduce(KernelRegistry& registry) {
  const auto add = [&registry](const char* op, auto make, Finish finish) {
    registry.add(op, {{.name = "lines", .why_not = why_not, .make = [=](NodeSpec& spec) {
                         return make(spec, finish);
                       }}});
  };
  add("ReduceSum", make_reduce<Kind::sum>, Finish::none);
  add("ReduceMean", make_reduce<Kind::sum>, Finish::mean);
  add("ReduceMax", make_reduce<Kind::maximum>, Finish::none);
  add("ReduceMin", make_reduce<Kind::minimum>, Finish::none);
  add("ReduceProd", make_reduce<Kind::product>, Finish::none);
  add("ReduceL1", make_reduce<Kind::sum_abs>, Finish::none);
  add("ReduceL2", make_reduce<Kind::sum_squares>, Finish::sqrt);
  add("ReduceSumSquare", make_reduce<Kind::sum_squares>, Finish::none);
  add("ReduceLogSum", make_reduce<Kind::sum>, Finish::log);
  registry.add("ortrain::WideReduceSum",
               {{.name = "lines", .why_not = why_not, .make = make_wide_sum}});
  registry.add("ReduceLogSumExp",
               {{.name = "lines", .why_not = why_not, .make = make_log_sum_exp}});
  registry.add("ortrain::ReduceProdGrad",
               {{.name = "threads",
                 .why_not = [](const NodeSpec& spec) -> std::optional<std::string> {
                   if (prod_grad_layout(spec)) return std::nullopt;
                   return str("kept and reduced axes change places more than ", ReduceLayout::kMost,
                              " times");
                 },
                 .make = make_prod_grad}});
}

}  // namespace ortrain::gpu
