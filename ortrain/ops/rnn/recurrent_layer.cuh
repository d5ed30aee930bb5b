// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "ortrain/gpu/gemm.h"
#include "ortrain/gpu/gemm_kernel.h"
#include "ortrain/ops/rnn/recurrent_sequence.cuh"
#include "ortrain/ops/rnn/recurrent_tensors.cuh"
#include "ortrain/runtime/kernel_registry.h"

// A recurrent layer: one product for the inputs of all steps, then all steps in one launch, or per
// step a product with the state and a kernel for the gates; backward the same from the last step
// on, then one product for each gradient of a whole sequence. 16-bit types keep y, the gates and
// their gradients rounded, and sum and carry cells and gradients of states in float.
namespace ortrain::gpu {

// What both ways of going through a sequence have in common: the product of all inputs, and memory
// for what nobody wants.
template <class T, class Cell>
class ForwardLayer {
 public:
  using At = ForwardPlaces<Cell>;

  explicit ForwardLayer(const NodeSpec& spec)
      : r_(recurrence_of(spec, At::kX, At::kH0)),
        tensors_(spec),
        from_x_({.dtype = spec.input(At::kX).dtype,
                 .m = r_.rows(),
                 .n = Cell::kGates * r_.hidden,
                 .k = r_.input,
                 .trans_b = true,
                 .ldd = std::max<int64_t>(Cell::kSaved * r_.hidden, 1)}) {}

  const Recurrence& extents() const { return r_; }
  ByteCount products_workspace() const { return from_x_.workspace_bytes(); }
  void add_to(Scratch& scratch) {
    if (!tensors_.wants(At::kY)) y_at_ = scratch.add<T>(r_.steps * r_.state());
    if (!kSavesOutput && !tensors_.wants(At::kSaved)) {
      saved_at_ = scratch.add<T>(r_.steps * r_.state() * Cell::kSaved);
    }
  }

  // All steps in one launch.
  template <int kRows>
  static auto sequence_kernel() {
    return recurrent_forward_sequence<T, Cell, kRows>;
  }
  // What the inputs give to the gates is on its way into `saved`.
  ForwardSequence<T, Cell> start(const KernelArgs& args) const {
    const auto in = [&](size_t i) { return tensors_.in(args, i); };
    const auto out = [&](size_t i) { return tensors_.out(args, i); };
    ForwardSequence<T, Cell> s;
    s.steps = r_.steps;
    s.batch = r_.batch;
    s.hidden = r_.hidden;
    s.reverse = r_.reverse;
    s.w_hh = in(At::kWhh);
    s.b_ih = in(At::kBih);
    s.b_hh = in(At::kBhh);
    s.h0 = in(At::kH0);
    s.first_memory = in(Cell::kStates == 2 ? At::kC0 : At::kH0);
    s.y = tensors_.wants(At::kY) ? out(At::kY) : Scratch::at<T>(args, y_at_);
    s.saved = s.y;
    if (!kSavesOutput) {
      s.saved = tensors_.wants(At::kSaved) ? out(At::kSaved) : Scratch::at<T>(args, saved_at_);
    }
    s.h_n = out(At::kHn);
    if constexpr (Cell::kStates == 2) {
      s.c_n = out(At::kCn);
      s.cells = out(At::kCells);
    }
    from_x_.run({.a = in(At::kX), .b = in(At::kWih), .d = s.saved}, args.workspace, args.stream);
    return s;
  }
  void finish(const KernelArgs&, const ForwardSequence<T, Cell>&) const {}

 private:
  // The plain cell saves y itself.
  static constexpr bool kSavesOutput = Cell::kSaved == 1;

  Recurrence r_;
  NodeTensors<T> tensors_;
  Gemm from_x_;
  size_t y_at_ = 0, saved_at_ = 0;
};

template <class T>
void launch_sum_states(const KernelArgs& args, int64_t count, const ComputeType<T>* a,
                       const ComputeType<T>* b, const T* c, T* out) {
  if (out == nullptr) return;
  launch(sum_states<T>, items(count), args.stream, count, a, b, c, out);
}

template <class T, class Cell>
KernelFn forward_by_steps(NodeSpec& spec, Cell cell) {
  using C = ComputeType<T>;
  ForwardLayer<T, Cell> layer(spec);
  const Recurrence& r = layer.extents();
  const int64_t width = Cell::kGates * r.hidden;
  const Gemm from_h({.dtype = spec.input(0).dtype,
                     .m = r.batch,
                     .n = width,
                     .k = r.hidden,
                     .trans_b = true,
                     .keep_sums = true});
  Scratch scratch(std::max(layer.products_workspace(), from_h.workspace_bytes()));
  const size_t from_h_at = scratch.add<C>(r.batch * width);
  const size_t memory_at = scratch.add<C>(Cell::kMemory ? r.state() : 0);
  layer.add_to(scratch);
  spec.request_workspace(scratch.bytes());

  return [=](const KernelArgs& args) {
    const ForwardSequence<T, Cell> s = layer.start(args);
    C* const gates_of_h = Scratch::at<C>(args, from_h_at);
    for (int64_t k = 0; k < s.steps; ++k) {
      from_h.run({.a = s.h_before(k), .b = s.w_hh, .d = gates_of_h}, args.workspace, args.stream);
      launch(recurrent_forward<T, Cell>, unit_shape(s.batch, s.hidden), args.stream, cell,
             s.step(k), gates_of_h, k == 0 ? s.first_memory : nullptr,
             Scratch::at<C>(args, memory_at));
    }
    if (s.steps > 0) return;
    launch_sum_states<T>(args, s.batch * s.hidden, nullptr, nullptr, s.h0, s.h_n);
    launch_sum_states<T>(args, s.batch * s.hidden, nullptr, nullptr, s.first_memory, s.c_n);
  };
}

// The gradients of a whole sequence, from those of the gates' inputs.
template <class T, class Cell>
class SequenceGradients {
 public:
  using At = GradPlaces<Cell>;

  SequenceGradients(const NodeSpec& spec, const Recurrence& r, const NodeTensors<T>& tensors)
      : r_(r), tensors_(tensors), width_(Cell::kGates * r.hidden) {
    const DType type = spec.input(At::kX).dtype;
    const auto product = [&](int64_t m, int64_t n, int64_t k, bool trans_a) {
      return Gemm({.dtype = type, .m = m, .n = n, .k = k, .trans_a = trans_a});
    };
    if (tensors.wants(At::kDx)) dx_ = product(r.rows(), r.input, width_, false);
    if (tensors.wants(At::kDwih)) dw_ih_ = product(width_, r.input, r.rows(), true);
    if (tensors.wants(At::kDwhh)) {
      // Of two products, rounded once.
      sums_in_float_ = r.steps > 1 && sizeof(T) == 2;
      const auto part = [&](int64_t k, double beta) {
        return Gemm({.dtype = type,
                     .m = width_,
                     .n = r.hidden,
                     .k = k,
                     .trans_a = true,
                     .beta = beta,
                     .keep_sums = sums_in_float_});
      };
      dw_hh_first_ = part(r.steps == 0 ? 0 : r.batch, 0);
      if (r.steps > 1) dw_hh_rest_ = part(r.rows() - r.batch, 1);
    }
    sums_ = {.dtype = type, .m = r.rows(), .n = width_, .ldd = std::max<int64_t>(width_, 1)};
  }

  ByteCount workspace_bytes() const {
    ByteCount bytes = column_sum_workspace(sums_);
    for (const auto* gemm : {&dx_, &dw_ih_, &dw_hh_first_, &dw_hh_rest_}) {
      if (*gemm) bytes = std::max(bytes, (*gemm)->workspace_bytes());
    }
    return bytes;
  }

  void add_to(Scratch& scratch) {
    if (sums_in_float_) dw_hh_at_ = scratch.add<float>(width_ * r_.hidden);
  }

  // [steps, batch, gates * hidden], of what x and h give to the gates.
  void run(const KernelArgs& args, T* dgates_x, T* dgates_h) const {
    const auto in = [&](size_t i) { return tensors_.in(args, i); };
    const auto out = [&](size_t i) { return tensors_.out(args, i); };
    const auto multiply = [&](const std::optional<Gemm>& gemm, const T* a, const T* b, void* d) {
      if (gemm) gemm->run({.a = a, .b = b, .d = d, .c = d}, args.workspace, args.stream);
    };
    multiply(dx_, dgates_x, in(At::kWih), out(At::kDx));
    multiply(dw_ih_, dgates_x, in(At::kX), out(At::kDwih));
    // The state before the first step is h0, before a later one y one step behind.
    const int64_t first = r_.steps == 0 ? 0 : r_.step(0) * r_.batch * width_;
    const T *y = in(At::kY), *h_first = dgates_h + first;
    auto* const sums = sums_in_float_ ? Scratch::at<ComputeType<T>>(args, dw_hh_at_) : nullptr;
    void* const dw_hh = sums_in_float_ ? static_cast<void*>(sums) : out(At::kDwhh);
    multiply(dw_hh_first_, h_first, in(At::kH0), dw_hh);
    multiply(dw_hh_rest_, r_.reverse ? dgates_h : dgates_h + r_.batch * width_,
             r_.reverse ? y + r_.state() : y, dw_hh);
    if (sums_in_float_) {
      launch_sum_states<T>(args, width_ * r_.hidden, sums, nullptr, nullptr, out(At::kDwhh));
    }
    add_up(args, dgates_x, out(At::kDbih));
    if constexpr (!Cell::kOneGradient) add_up(args, dgates_h, out(At::kDbhh));
  }

 private:
  void add_up(const KernelArgs& args, T* rows, T* sums) const {
    if (sums == nullptr || width_ == 0) return;
    sum_columns(sums_, {.d = rows, .bias_gradient = sums}, args.workspace, args.stream);
  }

  Recurrence r_;
  NodeTensors<T> tensors_;
  int64_t width_;
  std::optional<Gemm> dx_, dw_ih_, dw_hh_first_, dw_hh_rest_;
  GemmProblem sums_;
  bool sums_in_float_ = false;
  size_t dw_hh_at_ = 0;
};

template <class T, class Cell>
class BackwardLayer {
 public:
  using At = GradPlaces<Cell>;

  explicit BackwardLayer(const NodeSpec& spec)
      : r_(recurrence_of(spec, At::kX, At::kH0)), tensors_(spec), whole_(spec, r_, tensors_) {}

  const Recurrence& extents() const { return r_; }
  ByteCount products_workspace() const { return whole_.workspace_bytes(); }
  void add_to(Scratch& scratch) {
    const int64_t count = r_.steps * r_.state() * Cell::kGates;
    dgates_x_at_ = dgates_h_at_ = scratch.add<T>(count);
    if (!Cell::kOneGradient) dgates_h_at_ = scratch.add<T>(count);
    whole_.add_to(scratch);
  }

  BackwardSequence<T, Cell> start(const KernelArgs& args) const {
    const auto in = [&](size_t i) { return tensors_.in(args, i); };
    BackwardSequence<T, Cell> s;
    s.steps = r_.steps;
    s.batch = r_.batch;
    s.hidden = r_.hidden;
    s.reverse = r_.reverse;
    s.w_hh = in(At::kWhh);
    // The plain cell saves y itself.
    s.saved = in(Cell::kSaved == 1 ? At::kY : At::kSaved);
    s.memory = in(kHasCells ? At::kCells : At::kY);
    s.first_memory = in(kHasCells ? At::kC0 : At::kH0);
    s.dy = in(At::kDy);
    s.dh_n = in(At::kDhn);
    s.dh0 = tensors_.out(args, At::kDh0);
    if constexpr (kHasCells) {
      s.dc_n = in(At::kDcn);
      s.dc0 = tensors_.out(args, At::kDc0);
    }
    s.dgates_x = Scratch::at<T>(args, dgates_x_at_);
    s.dgates_h = Scratch::at<T>(args, dgates_h_at_);
    return s;
  }
  template <int kRows>
  static auto sequence_kernel() {
    return recurrent_backward_sequence<T, Cell, kRows>;
  }
  // When the gradients of all gates are there.
  void finish(const KernelArgs& args, const BackwardSequence<T, Cell>& s) const {
    whole_.run(args, s.dgates_x, s.dgates_h);
  }

 private:
  static constexpr bool kHasCells = Cell::kStates == 2;

  Recurrence r_;
  NodeTensors<T> tensors_;
  SequenceGradients<T, Cell> whole_;
  size_t dgates_x_at_ = 0, dgates_h_at_ = 0;
};

template <class T, class Cell>
KernelFn backward_by_steps(NodeSpec& spec, Cell cell) {
  using C = ComputeType<T>;
  BackwardLayer<T, Cell> layer(spec);
  const Recurrence& r = layer.extents();
  const Gemm to_state({.dtype = spec.input(GradPlaces<Cell>::kX).dtype,
                       .m = r.batch,
                       .n = r.hidden,
                       .k = Cell::kGates * r.hidden,
                       .keep_sums = true});
  Scratch scratch(std::max(layer.products_workspace(), to_state.workspace_bytes()));
  const size_t dh_at = scratch.add<C>(r.state());
  const size_t d_memory_at = scratch.add<C>(Cell::kMemory ? r.state() : 0);
  layer.add_to(scratch);
  spec.request_workspace(scratch.bytes());

  return [=](const KernelArgs& args) {
    const BackwardSequence<T, Cell> s = layer.start(args);
    const int64_t count = s.batch * s.hidden;
    C *const dh = Scratch::at<C>(args, dh_at), *const d_memory = Scratch::at<C>(args, d_memory_at);
    for (int64_t k = s.steps; k-- > 0;) {
      const BackwardStep<T> step = s.step(k);
      launch(recurrent_backward<T, Cell>, unit_shape(s.batch, s.hidden), args.stream, cell, step,
             k + 1 == s.steps, dh, d_memory);
      if (k == 0 && s.dh0 == nullptr) break;
      const GemmOperands operands{.a = step.dgates_h, .b = s.w_hh, .d = dh};
      to_state.run(operands, args.workspace, args.stream);
    }
    if (s.steps == 0) {
      launch_sum_states<T>(args, count, nullptr, nullptr, s.dh_n, s.dh0);
      launch_sum_states<T>(args, count, nullptr, nullptr, s.dc_n, s.dc0);
    } else {
      launch_sum_states<T>(args, count, dh, Cell::kMemoryIsState ? d_memory : nullptr, nullptr,
                           s.dh0);
      launch_sum_states<T>(args, count, d_memory, nullptr, nullptr, s.dc0);
    }
    layer.finish(args, s);
  };
}

// By a ForwardLayer or BackwardLayer.
template <class Layer, class T, class Cell>
KernelFn at_once(NodeSpec& spec, Cell cell) {
  Layer layer(spec);
  const auto blocks = SequenceBlocks::of<T, Cell>(layer.extents());
  const LaunchShape shape = blocks.template shape<Cell>(layer.extents());
  Scratch scratch(layer.products_workspace());
  layer.add_to(scratch);
  spec.request_workspace(scratch.bytes());
  return [=, rows = blocks.rows](const KernelArgs& args) {
    const auto s = layer.start(args);
    with_sequence_rows(rows, [&](auto count) {
      launch(Layer::template sequence_kernel<count.value>(), shape, args.stream, cell, s);
    });
    layer.finish(args, s);
  };
}

// Calls body(tag) with the type of the node's x.
template <class Places, class Body>
auto with_type_of(const NodeSpec& spec, const Body& body) {
  return dispatch_float(spec.input(Places::kX).dtype, body);
}

template <class Cell, class Places>
std::optional<std::string> refuse_sequence(const NodeSpec& spec) {
  const Recurrence r = recurrence_of(spec, Places::kX, Places::kH0);
  std::string refusal = with_type_of<Places>(spec, [&](auto tag) {
    return SequenceBlocks::of<typename decltype(tag)::type, Cell>(r).refusal;
  });
  if (refusal.empty()) return std::nullopt;
  return refusal;
}

// make_at_once, make_by_steps: (tag of x's type, spec) -> KernelFn.
template <class Cell, class Places, class AtOnce, class BySteps>
void add_recurrent_kernels(KernelRegistry& registry, const std::string& op,
                           const AtOnce& make_at_once, const BySteps& make_by_steps) {
  const auto of_type = [](const auto& make) {
    return [=](NodeSpec& spec) {
      return with_type_of<Places>(spec, [&](auto tag) { return make(tag, spec); });
    };
  };
  registry.add(op, {{.name = "sequence",
                     .why_not = refuse_sequence<Cell, Places>,
                     .make = of_type(make_at_once)},
                    {.name = "steps", .make = of_type(make_by_steps)}});
}

// cell_of(spec): the cell of a node.
template <class Cell, class CellOf>
void register_recurrent(KernelRegistry& registry, const std::string& op, const CellOf& cell_of) {
  add_recurrent_kernels<Cell, ForwardPlaces<Cell>>(
      registry, op,
      [=](auto tag, NodeSpec& spec) {
        using T = typename decltype(tag)::type;
        return at_once<ForwardLayer<T, Cell>, T>(spec, cell_of(spec));
      },
      [=](auto tag, NodeSpec& spec) {
        return forward_by_steps<typename decltype(tag)::type, Cell>(spec, cell_of(spec));
      });
  add_recurrent_kernels<Cell, GradPlaces<Cell>>(
      registry, op + "Grad",
      [=](auto tag, NodeSpec& spec) {
        using T = typename decltype(tag)::type;
        return at_once<BackwardLayer<T, Cell>, T>(spec, cell_of(spec));
      },
      [=](auto tag, NodeSpec& spec) {
        return backward_by_steps<typename decltype(tag)::type, Cell>(spec, cell_of(spec));
      });
}

}  // namespace ortrain::gpu
