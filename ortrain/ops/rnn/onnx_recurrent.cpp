// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <map>
#include <string>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

// ONNX's LSTM, GRU and RNN. A direction that is as PyTorch has it becomes one node of our own; any
// other is written out step by step, which needs a known number of steps.
namespace ortrain::ops {
namespace {

constexpr int64_t kMostSteps = 1024;

struct Kind {
  const char* own;
  std::vector<int64_t> order;  // of ONNX's gates, the one that stands first in ours, ...
  size_t states;
  std::vector<const char*> activations;  // by default
};

const Kind kLstm{"LSTM", {0, 2, 3, 1}, 2, {"sigmoid", "tanh", "tanh"}};
const Kind kGru{"GRU", {1, 0, 2}, 1, {"sigmoid", "tanh"}};
const Kind kRnn{"RNN", {0}, 1, {"tanh"}};

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// A function of ONNX's recurrent operators, by its name in lower case.
struct ActivationKind {
  const char* op;  // null: written out
  bool has_alpha = false, has_beta = false;
  double alpha = 0, beta = 0;  // by default
};

const std::map<std::string, ActivationKind>& activation_kinds() {
  static const std::map<std::string, ActivationKind> kinds{
      {"relu", {"Relu"}},
      {"tanh", {"Tanh"}},
      {"sigmoid", {"Sigmoid"}},
      {"softsign", {"Softsign"}},
      {"softplus", {"Softplus"}},
      {"affine", {nullptr, true, true, 1, 0}},
      {"scaledtanh", {nullptr, true, true, 1, 1}},
      {"leakyrelu", {"LeakyRelu", true, false, 0.01}},
      {"thresholdedrelu", {"ThresholdedRelu", true, false, 1}},
      {"elu", {"Elu", true, false, 1}},
      {"hardsigmoid", {"HardSigmoid", true, true, 0.2, 0.5}},
  };
  return kinds;
}

struct Activation {
  std::string name;  // lower case
  ActivationKind kind;
};

ValueId apply(ExpandContext& e, const Activation& f, ValueId x) {
  const ActivationKind& kind = f.kind;
  if (kind.op != nullptr) {
    Attributes attributes;
    if (kind.has_alpha) attributes.emplace("alpha", kind.alpha);
    if (kind.has_beta) attributes.emplace("beta", kind.beta);
    return e.op(kind.op, {x}, std::move(attributes));
  }
  if (f.name == "affine") return e.add(e.mul(x, kind.alpha), kind.beta);
  return e.mul(e.unary("Tanh", e.mul(x, kind.beta)), kind.alpha);
}

class Recurrent {
 public:
  Recurrent(ExpandContext& e, const Kind& kind)
      : e_(e), kind_(kind), gates_(static_cast<int64_t>(kind.order.size())) {
    batch_first_ = e.attrs().int_("layout") != 0;
    const std::string& direction = e.attrs().string_("direction");
    if (direction != "forward" && direction != "reverse" && direction != "bidirectional") {
      throw InvalidModelError(str("direction '", direction, "' is not known"));
    }
    directions_ = direction == "bidirectional" ? 2 : 1;
    starts_reversed_ = direction == "reverse";
    x_ = e.input(0);
    if (e.rank(x_) != 3)
      throw ShapeError(str("X is ", shape_str(e.shape(x_)), ", expected rank 3"));
    if (batch_first_) x_ = e.transpose(x_, {1, 0, 2});
    hidden_ = e.known_extent(e.input(2), 2, "R");
    if (e.rank(e.input(1)) != 3 || e.known_extent(e.input(2), 0, "R") != directions_ ||
        e.known_extent(e.input(2), 1, "R") != gates_ * hidden_) {
      throw ShapeError(str("W is ", shape_str(e.shape(e.input(1))), ", R ",
                           shape_str(e.shape(e.input(2))), "; expected [", directions_, ", ",
                           gates_ * hidden_, ", ...] for hidden_size ", hidden_));
    }
    read_activations();
    if (e.attrs().has("clip")) clip_ = e.attrs().float_("clip");
  }

  std::vector<ValueId> build() {
    std::vector<ValueId> sequences;
    std::vector<std::vector<ValueId>> states(kind_.states);
    for (int64_t d = 0; d < directions_; ++d) {
      const std::vector<ValueId> made = is_ours(d) ? as_own_node(d) : step_by_step(d);
      sequences.push_back(e_.unsqueeze(made[0], {batch_first_ ? 2 : 1}));
      for (size_t s = 0; s < kind_.states; ++s) {
        states[s].push_back(e_.unsqueeze(made[1 + s], {batch_first_ ? 1 : 0}));
      }
    }
    std::vector<ValueId> outputs{e_.concat(sequences, batch_first_ ? 2 : 1)};
    for (const std::vector<ValueId>& state : states) {
      outputs.push_back(e_.concat(state, batch_first_ ? 1 : 0));
    }
    return outputs;
  }

 private:
  // alpha and beta are given for those functions that have one, in their order.
  void read_activations() {
    std::vector<std::string> names;
    if (e_.attrs().has("activations")) {
      names = e_.attrs().strings("activations");
    } else {
      for (int64_t d = 0; d < directions_; ++d) {
        names.insert(names.end(), kind_.activations.begin(), kind_.activations.end());
      }
    }
    if (names.size() != kind_.activations.size() * static_cast<size_t>(directions_)) {
      throw InvalidModelError(str("'activations' has ", names.size(), " entries, expected ",
                                  kind_.activations.size() * static_cast<size_t>(directions_)));
    }
    std::vector<double> alphas, betas;
    if (e_.attrs().has("activation_alpha")) alphas = e_.attrs().floats("activation_alpha");
    if (e_.attrs().has("activation_beta")) betas = e_.attrs().floats("activation_beta");
    size_t alpha = 0, beta = 0;
    for (const std::string& name : names) {
      const auto known = activation_kinds().find(lower(name));
      if (known == activation_kinds().end()) throw UnsupportedError(str("activation '", name, "'"));
      Activation f{known->first, known->second};
      if (f.kind.has_alpha && alpha < alphas.size()) f.kind.alpha = alphas[alpha++];
      if (f.kind.has_beta && beta < betas.size()) f.kind.beta = betas[beta++];
      activations_.push_back(f);
    }
  }

  const Activation& activation(int64_t direction, size_t i) const {
    return activations_[static_cast<size_t>(direction) * kind_.activations.size() + i];
  }

  bool is_reversed(int64_t direction) const { return starts_reversed_ || direction == 1; }

  bool linear_before_reset() const { return e_.attrs().int_("linear_before_reset") != 0; }

  bool is_ours(int64_t direction) const {
    if (clip_ || e_.has_input(4)) return false;
    if (&kind_ == &kLstm && (e_.has_input(7) || e_.attrs().int_("input_forget") != 0)) return false;
    if (&kind_ == &kGru && !linear_before_reset()) return false;
    if (&kind_ == &kRnn && activation(direction, 0).name == "relu") return true;
    for (size_t i = 0; i < kind_.activations.size(); ++i) {
      if (activation(direction, i).name != kind_.activations[i]) return false;
    }
    return true;
  }

  // What input `index`, [directions, ...], holds for a direction.
  ValueId of_direction(size_t index, int64_t direction, int64_t axis = 0) {
    return e_.squeeze(e_.slice(e_.input(index), axis, direction, direction + 1), {axis});
  }

  // The blocks of a weight or bias in our order.
  ValueId reordered(ValueId blocks) {
    std::vector<ValueId> parts;
    for (int64_t gate : kind_.order) parts.push_back(block(blocks, gate));
    return e_.concat(parts, 0);
  }

  ValueId block(ValueId blocks, int64_t i) {
    return e_.slice(blocks, 0, i * hidden_, (i + 1) * hidden_);
  }

  ValueId half_of_bias(int64_t direction, int64_t half) {
    const int64_t width = gates_ * hidden_;
    return e_.slice(of_direction(3, direction), 0, half * width, (half + 1) * width);
  }

  // [B, H]; input 5 is initial_h, 6 initial_c.
  ValueId initial_state(size_t state, int64_t direction) {
    if (e_.has_input(5 + state)) return of_direction(5 + state, direction, batch_first_ ? 1 : 0);
    const ValueId extents = e_.concat({e_.extent_of(x_, 1), e_.int64s({hidden_})}, 0);
    return e_.op("Expand", {e_.scalar(e_.dtype(x_), 0.0), extents});
  }

  std::vector<ValueId> as_own_node(int64_t direction) {
    std::vector<ValueId> inputs{x_};
    for (size_t s = 0; s < kind_.states; ++s) inputs.push_back(initial_state(s, direction));
    inputs.push_back(reordered(of_direction(1, direction)));
    inputs.push_back(reordered(of_direction(2, direction)));
    if (e_.has_input(3)) {
      inputs.push_back(reordered(half_of_bias(direction, 0)));
      inputs.push_back(reordered(half_of_bias(direction, 1)));
    }
    Attributes attributes{{"hidden_size", hidden_},
                          {"reverse", static_cast<int64_t>(is_reversed(direction))}};
    if (&kind_ == &kRnn) attributes.emplace("activation", activation(direction, 0).name);
    std::vector<ValueId> made =
        e_.node(kOrtrainDomain, kind_.own, std::move(inputs), std::move(attributes),
                std::vector<bool>(1 + kind_.states, true));
    if (batch_first_) made[0] = e_.transpose(made[0], {1, 0, 2});
    return made;
  }

  struct Weights {
    ValueId w, r, b_w, b_r, peepholes;
  };

  std::vector<ValueId> step_by_step(int64_t direction) {
    const int64_t steps = e_.known_extent(x_, 0, "X, time first,");
    if (steps > kMostSteps) {
      throw UnsupportedError(str("a form that is written out step by step, of ", steps,
                                 " steps; up to ", kMostSteps, " are supported"));
    }
    Weights weights{e_.transpose(of_direction(1, direction), {1, 0}), of_direction(2, direction),
                    kNoValue, kNoValue, kNoValue};
    if (e_.has_input(3)) {
      weights.b_w = half_of_bias(direction, 0);
      weights.b_r = half_of_bias(direction, 1);
    }
    if (&kind_ == &kLstm && e_.has_input(7)) weights.peepholes = of_direction(7, direction);
    std::vector<ValueId> state;
    for (size_t s = 0; s < kind_.states; ++s) state.push_back(initial_state(s, direction));
    std::vector<ValueId> made(static_cast<size_t>(steps));
    for (int64_t k = 0; k < steps; ++k) {
      const int64_t t = is_reversed(direction) ? steps - 1 - k : k;
      ValueId from_x = e_.op("MatMul", {e_.squeeze(e_.slice(x_, 0, t, t + 1), {0}), weights.w});
      if (weights.b_w != kNoValue) from_x = e_.add(from_x, weights.b_w);
      std::vector<ValueId> next = cell(direction, from_x, state, weights);
      ValueId output = next[0];
      if (e_.has_input(4)) {
        const ValueId step = e_.constant(TensorData::int_scalar(e_.dtype(e_.input(4)), t));
        const ValueId runs = e_.unsqueeze(e_.op("Less", {step, e_.input(4)}), {1});
        for (size_t s = 0; s < state.size(); ++s) next[s] = e_.where(runs, next[s], state[s]);
        output = e_.where(runs, output, e_.scalar(e_.dtype(x_), 0.0));
      }
      state = std::move(next);
      made[static_cast<size_t>(t)] = e_.unsqueeze(output, {batch_first_ ? 1 : 0});
    }
    if (made.empty()) throw UnsupportedError("a sequence without steps");
    std::vector<ValueId> outputs{e_.concat(made, batch_first_ ? 1 : 0)};
    outputs.insert(outputs.end(), state.begin(), state.end());
    return outputs;
  }

  ValueId gate(ValueId values, int64_t i) {
    return e_.slice(values, 1, i * hidden_, (i + 1) * hidden_);
  }

  ValueId activated(int64_t direction, size_t i, ValueId x) {
    if (clip_) {
      const DType type = e_.dtype(x);
      x = e_.op("Clip", {x, e_.scalar(type, -*clip_), e_.scalar(type, *clip_)});
    }
    return apply(e_, activation(direction, i), x);
  }

  // h times the rows of R from block `first` on, plus the bias.
  ValueId from_state(ValueId h, const Weights& w, int64_t first, int64_t last) {
    const ValueId rows = e_.slice(w.r, 0, first * hidden_, last * hidden_);
    const ValueId product = e_.op("MatMul", {h, e_.transpose(rows, {1, 0})});
    if (w.b_r == kNoValue) return product;
    return e_.add(product, e_.slice(w.b_r, 0, first * hidden_, last * hidden_));
  }

  std::vector<ValueId> cell(int64_t d, ValueId from_x, const std::vector<ValueId>& state,
                            const Weights& w) {
    if (&kind_ == &kLstm) return lstm_cell(d, from_x, state, w);
    if (&kind_ == &kGru) return {gru_cell(d, from_x, state[0], w)};
    return {activated(d, 0, e_.add(from_x, from_state(state[0], w, 0, 1)))};
  }

  // Gates i o f c; peepholes i o f.
  std::vector<ValueId> lstm_cell(int64_t d, ValueId from_x, const std::vector<ValueId>& state,
                                 const Weights& w) {
    const ValueId sum = e_.add(from_x, from_state(state[0], w, 0, 4));
    const auto input_of = [&](int64_t i, ValueId cells) {
      if (w.peepholes == kNoValue) return gate(sum, i);
      return e_.add(gate(sum, i), e_.mul(block(w.peepholes, i), cells));
    };
    const ValueId i = activated(d, 0, input_of(0, state[1]));
    const ValueId f = e_.attrs().int_("input_forget") != 0 ? e_.sub(e_.scalar(e_.dtype(i), 1.0), i)
                                                           : activated(d, 0, input_of(2, state[1]));
    const ValueId c = e_.add(e_.mul(f, state[1]), e_.mul(i, activated(d, 1, gate(sum, 3))));
    const ValueId o = activated(d, 0, input_of(1, c));
    return {e_.mul(o, apply(e_, activation(d, 2), c)), c};
  }

  // Gates z r h.
  ValueId gru_cell(int64_t d, ValueId from_x, ValueId h, const Weights& w) {
    const ValueId from_h = from_state(h, w, 0, 2);
    const ValueId z = activated(d, 0, e_.add(gate(from_x, 0), gate(from_h, 0)));
    const ValueId r = activated(d, 0, e_.add(gate(from_x, 1), gate(from_h, 1)));
    const ValueId reset = linear_before_reset() ? e_.mul(r, from_state(h, w, 2, 3))
                                                : from_state(e_.mul(r, h), w, 2, 3);
    const ValueId made = activated(d, 1, e_.add(gate(from_x, 2), reset));
    const ValueId rest = e_.sub(e_.scalar(e_.dtype(z), 1.0), z);
    return e_.add(e_.mul(rest, made), e_.mul(z, h));
  }

  ExpandContext& e_;
  const Kind& kind_;
  int64_t gates_, directions_ = 1, hidden_ = 0;
  bool batch_first_ = false, starts_reversed_ = false;
  ValueId x_ = kNoValue;
  std::vector<Activation> activations_;
  std::optional<double> clip_;
};

// For nodes that are made for files; what runs is inferred by what they stand for.
void infer_recurrent(InferContext& context) {
  const Shape& x = context.shape(0);
  const Shape& recurrent = context.shape(2);
  if (x.size() != 3 || recurrent.size() != 3) {
    throw ShapeError(
        str("X is ", shape_str(x), " and R ", shape_str(recurrent), ", expected three axes each"));
  }
  const Dim directions = recurrent[0], hidden = recurrent[2];
  if (context.attrs().int_("layout") == 0) {
    context.set_output(0, context.dtype(0), {x[0], directions, x[1], hidden});
    for (size_t i = 1; i < context.num_outputs(); ++i) {
      context.set_output(i, context.dtype(0), {directions, x[1], hidden});
    }
    return;
  }
  context.set_output(0, context.dtype(0), {x[0], x[1], directions, hidden});
  for (size_t i = 1; i < context.num_outputs(); ++i) {
    context.set_output(i, context.dtype(0), {x[0], directions, hidden});
  }
}

void add_recurrent(OpRegistry& registry, const Kind& kind, const char* summary,
                   std::vector<FormalValue> more_inputs, std::vector<FormalAttribute> more) {
  std::vector<FormalValue> inputs{{"X", "T"},
                                  {"W", "T"},
                                  {"R", "T"},
                                  {"B", "T", Arity::optional},
                                  {"sequence_lens", "int32", Arity::optional},
                                  {"initial_h", "T", Arity::optional}};
  inputs.insert(inputs.end(), more_inputs.begin(), more_inputs.end());
  std::vector<FormalValue> outputs{{"Y", "T", Arity::optional}, {"Y_h", "T", Arity::optional}};
  if (kind.states == 2) outputs.push_back({"Y_c", "T", Arity::optional});
  std::vector<FormalAttribute> attributes{{"activation_alpha", AttributeKind::floats},
                                          {"activation_beta", AttributeKind::floats},
                                          {"activations", AttributeKind::strings},
                                          {"clip", AttributeKind::float_},
                                          {"direction", std::string("forward")},
                                          {"hidden_size", AttributeKind::int_},
                                          {"layout", int64_t{0}}};
  attributes.insert(attributes.end(), more.begin(), more.end());
  registry.add({.name = kind.own,
                .since = 7,
                .summary = summary,
                .inputs = std::move(inputs),
                .outputs = std::move(outputs),
                .attrs = std::move(attributes),
                .types = {{"T", kFloatTypes}},
                .infer = infer_recurrent,
                .expand = [&kind](ExpandContext& e) { return Recurrent(e, kind).build(); }});
}

}  // namespace

void register_onnx_recurrent(OpRegistry& registry);
void register_onnx_recurrent(OpRegistry& registry) {
  add_recurrent(registry, kLstm, "Long short-term memory, in one or both directions.",
                {{"initial_c", "T", Arity::optional}, {"P", "T", Arity::optional}},
                {{"input_forget", int64_t{0}}});
  add_recurrent(registry, kGru, "Gated recurrent units, in one or both directions.", {},
                {{"linear_before_reset", int64_t{0}}});
  add_recurrent(registry, kRnn, "A recurrent layer, in one or both directions.", {}, {});
}

}  // namespace ortrain::ops
