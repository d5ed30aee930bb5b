// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <utility>

#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/flops.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

// Where the inputs of a recurrent operator stand, and how many blocks of hidden size its weights
// have. States: h0, and c0 for the LSTM.
struct Signature {
  int64_t gates = 1;
  size_t states = 1;

  size_t w_ih() const { return 1 + states; }
  size_t w_hh() const { return 2 + states; }
  size_t b_ih() const { return 3 + states; }
  size_t b_hh() const { return 4 + states; }
};

constexpr Signature kLstm{4, 2}, kGru{3, 1}, kRnn{1, 1};

void check_shape(const Shape& actual, const Shape& expected, const std::string& name) {
  bool fits = actual.size() == expected.size();
  for (size_t i = 0; fits && i < actual.size(); ++i) {
    fits = actual[i] == expected[i] || !actual[i].is_constant() || !expected[i].is_constant();
  }
  if (!fits) {
    throw ShapeError(str(name, " is ", shape_str(actual), "; it must be ", shape_str(expected)));
  }
}

struct Extents {
  Dim steps, batch, input, hidden;

  Shape sequence(const Dim& width) const { return {steps, batch, width}; }
  Shape state() const { return {batch, hidden}; }
};

// Checks x, the states and the weights, which start at input `first` of the node.
Extents check_layer(const InferContext& context, const Signature& s, size_t first) {
  const Shape& x = context.shape(first);
  if (x.size() != 3) throw ShapeError(str("x is ", shape_str(x), "; it must be [S, B, I]"));
  const Shape& w_hh = context.shape(first + s.w_hh());
  if (w_hh.size() != 2) throw ShapeError(str("w_hh is ", shape_str(w_hh), "; it must be a matrix"));
  const Extents e{x[0], x[1], x[2], w_hh[1]};
  const std::optional<int64_t> given = context.attrs().optional_int("hidden_size");
  if (given && e.hidden.is_constant() && !e.hidden.is(*given)) {
    throw ShapeError(str("hidden_size is ", *given, ", w_hh is ", shape_str(w_hh)));
  }
  const Dim width = Dim(s.gates) * e.hidden;
  check_shape(context.shape(first + 1), e.state(), "h0");
  if (s.states == 2) check_shape(context.shape(first + 2), e.state(), "c0");
  check_shape(context.shape(first + s.w_ih()), {width, e.input}, "w_ih");
  check_shape(w_hh, {width, e.hidden}, "w_hh");
  return e;
}

void check_biases(const InferContext& context, const Signature& s, const Extents& e) {
  for (size_t i : {s.b_ih(), s.b_hh()}) {
    if (context.has_input(i)) {
      check_shape(context.shape(i), {Dim(s.gates) * e.hidden}, i == s.b_ih() ? "b_ih" : "b_hh");
    }
  }
}

// y, the last states, and what the backward needs: `saved` sequences of these blocks per step.
std::function<void(InferContext&)> infer_layer(Signature s, std::vector<int64_t> saved) {
  return [s, saved = std::move(saved)](InferContext& context) {
    const Extents e = check_layer(context, s, 0);
    check_biases(context, s, e);
    const DType dtype = context.dtype(0);
    size_t next = 0;
    context.set_output(next++, dtype, e.sequence(e.hidden));
    for (size_t i = 0; i < s.states; ++i) context.set_output(next++, dtype, e.state());
    for (int64_t blocks : saved) {
      context.set_output(next++, dtype, e.sequence(Dim(blocks) * e.hidden));
    }
  };
}

// dx, dh0 (dc0), dw_ih, dw_hh and `biases` bias gradients; the incoming gradients stand first.
std::function<void(InferContext&)> infer_layer_grad(Signature s, std::vector<int64_t> saved,
                                                    size_t biases) {
  return [s, saved = std::move(saved), biases](InferContext& context) {
    const size_t first = 1 + s.states;
    const Extents e = check_layer(context, s, first);
    if (context.has_input(0)) check_shape(context.shape(0), e.sequence(e.hidden), "dy");
    for (size_t i = 1; i <= s.states; ++i) {
      if (context.has_input(i)) check_shape(context.shape(i), e.state(), i == 1 ? "dh_n" : "dc_n");
    }
    size_t next = first + s.w_hh() + 1;
    check_shape(context.shape(next++), e.sequence(e.hidden), "y");
    for (int64_t blocks : saved) {
      check_shape(context.shape(next++), e.sequence(Dim(blocks) * e.hidden), "a saved value");
    }
    const DType dtype = context.dtype(first);
    size_t out = 0;
    context.set_output(out++, dtype, context.shape(first));
    for (size_t i = 0; i < s.states; ++i) context.set_output(out++, dtype, e.state());
    context.set_output(out++, dtype, context.shape(first + s.w_ih()));
    context.set_output(out++, dtype, context.shape(first + s.w_hh()));
    for (size_t i = 0; i < biases; ++i) {
      context.set_output(out++, dtype, {Dim(s.gates) * e.hidden});
    }
  };
}

bool needs(GradContext& g, size_t index) { return g.has_input(index) && g.needs_grad(index); }

// One gradient node; `saved` outputs of the forward node are its last inputs. With one bias
// gradient both biases get it.
std::function<void(GradContext&)> layer_gradient(const char* name, Signature s,
                                                 std::vector<size_t> saved, size_t biases) {
  return [=](GradContext& g) {
    for (size_t i : saved) {
      if (g.has_output_grad(i))
        throw UnsupportedError("a gradient of the values saved for backward");
    }
    std::vector<ValueId> inputs;
    for (size_t i = 0; i <= s.states; ++i) inputs.push_back(g.output_grad(i));
    for (size_t i = 0; i <= s.w_hh(); ++i) inputs.push_back(g.input(i));
    inputs.push_back(g.output(0));
    for (size_t i : saved) inputs.push_back(g.output(i));

    Attributes attributes = g.node().attributes;
    std::vector<bool> wanted;
    for (size_t i = 0; i <= s.w_hh(); ++i) wanted.push_back(needs(g, i));
    const bool b_ih = needs(g, s.b_ih()), b_hh = needs(g, s.b_hh());
    if (biases == 1) {
      wanted.push_back(b_ih || b_hh);
    } else {
      wanted.insert(wanted.end(), {b_ih, b_hh});
    }
    const std::vector<ValueId> made = g.GraphBuilder::node(kOrtrainDomain, name, std::move(inputs),
                                                           std::move(attributes), wanted);
    for (size_t i = 0; i <= s.w_hh(); ++i) {
      if (needs(g, i)) g.set_input_grad(i, made[i]);
    }
    if (b_ih) g.set_input_grad(s.b_ih(), made[s.b_ih()]);
    if (b_hh) g.set_input_grad(s.b_hh(), made[biases == 1 ? s.b_ih() : s.b_hh()]);
  };
}

std::vector<FormalValue> layer_inputs(const Signature& s) {
  std::vector<FormalValue> inputs = {{"x", "T"}, {"h0", "T"}};
  if (s.states == 2) inputs.push_back({"c0", "T"});
  inputs.push_back({"w_ih", "T"});
  inputs.push_back({"w_hh", "T"});
  return inputs;
}

std::vector<FormalValue> forward_inputs(const Signature& s) {
  std::vector<FormalValue> inputs = layer_inputs(s);
  inputs.push_back({"b_ih", "T", Arity::optional});
  inputs.push_back({"b_hh", "T", Arity::optional});
  return inputs;
}

std::vector<FormalValue> grad_inputs(const Signature& s, const std::vector<std::string>& saved) {
  std::vector<FormalValue> inputs = {{"dy", "T", Arity::optional}, {"dh_n", "T", Arity::optional}};
  if (s.states == 2) inputs.push_back({"dc_n", "T", Arity::optional});
  for (FormalValue& input : layer_inputs(s)) inputs.push_back(std::move(input));
  inputs.push_back({"y", "T"});
  for (const std::string& name : saved) inputs.push_back({name, "T"});
  return inputs;
}

std::vector<FormalValue> optional_values(const std::vector<std::string>& names) {
  std::vector<FormalValue> values;
  for (const std::string& name : names) values.push_back({name, "T", Arity::optional});
  return values;
}

std::vector<FormalAttribute> layer_attributes() {
  return {{"hidden_size", AttributeKind::int_}, {"reverse", int64_t{0}}};
}

// Inputs from `x` on: x[time, batch, in], `states` initial states, w_ih, w_hh.
double recurrence_flops(const NodeSpec& spec, size_t x, size_t states, double products) {
  const double steps = count_of(spec.input(x)) / std::max(extent_from_end(spec.input(x), 1), 1.0);
  return products * 2 * steps *
         (count_of(spec.input(x + 1 + states)) + count_of(spec.input(x + 2 + states)));
}

// ONNX's operator of the same name, whose gates stand in another order: `order` holds, for each of
// its gates, which one of ours it is. It has an axis for directions.
std::function<std::vector<ValueId>(ExpandContext&)> recurrent_form(const char* name, Signature s,
                                                                   std::vector<int64_t> order) {
  return [name, s, order = std::move(order)](ExpandContext& e) {
    for (size_t i = 1 + s.states; i < e.num_outputs(); ++i) {
      if (e.wants_output(i)) {
        throw UnsupportedError("what it keeps for the backward has no form in standard operators");
      }
    }
    const int64_t hidden = e.known_extent(e.input(s.w_hh()), 1, "hidden size");
    const auto reordered = [&](ValueId a) {
      std::vector<ValueId> gates;
      for (int64_t gate : order) gates.push_back(e.slice(a, 0, gate * hidden, (gate + 1) * hidden));
      return e.concat(std::move(gates), 0);
    };
    ValueId bias = kNoValue;
    if (e.has_input(s.b_ih()) || e.has_input(s.b_hh())) {
      const auto part = [&](size_t i) {
        if (e.has_input(i)) return reordered(e.input(i));
        const ValueId width = e.int64s({s.gates * hidden});
        return e.op("Expand", {e.scalar(e.dtype(e.input(0)), 0.0), width});
      };
      bias = e.unsqueeze(e.concat({part(s.b_ih()), part(s.b_hh())}, 0), {0});
    }
    std::vector<ValueId> inputs{e.input(0), e.unsqueeze(reordered(e.input(s.w_ih())), {0}),
                                e.unsqueeze(reordered(e.input(s.w_hh())), {0}), bias, kNoValue};
    for (size_t i = 0; i < s.states; ++i) inputs.push_back(e.unsqueeze(e.input(1 + i), {0}));
    Attributes attributes{
        {"hidden_size", hidden},
        {"direction", std::string(e.attrs().int_("reverse") != 0 ? "reverse" : "forward")}};
    if (s.gates == 3) attributes["linear_before_reset"] = int64_t{1};
    if (s.gates == 1) {
      const std::string& activation = e.attrs().string_("activation");
      attributes["activations"] = std::vector<std::string>{activation == "relu" ? "Relu" : "Tanh"};
    }
    e.set_keeps_composites(true);
    const std::vector<ValueId> made = e.node("", name, std::move(inputs), std::move(attributes),
                                             std::vector<bool>(1 + s.states, true));
    std::vector<ValueId> results{e.squeeze(made[0], {1})};
    for (size_t i = 0; i < s.states; ++i) results.push_back(e.squeeze(made[1 + i], {0}));
    return results;
  };
}

void register_lstm(OpRegistry& registry) {
  const std::string own(kOrtrainDomain);
  registry.add({.name = "LSTM",
                .domain = own,
                .summary = "One LSTM layer in one direction, gates in the order i f g o: "
                           "c' = f * c + i * g, h' = o * tanh(c').",
                .inputs = forward_inputs(kLstm),
                .outputs = optional_values({"y", "h_n", "c_n", "gates", "cells"}),
                .attrs = layer_attributes(),
                .types = {{"T", kFloatTypes}},
                .precision = Precision::deny,
                .infer = infer_layer(kLstm, {4, 1}),
                .gradient = layer_gradient("LSTMGrad", kLstm, {3, 4}, 1),
                .flops = [](const NodeSpec& s) { return recurrence_flops(s, 0, 2, 1); },
                .standard_form = recurrent_form("LSTM", kLstm, {0, 3, 1, 2})});
  registry.add({.name = "LSTMGrad",
                .domain = own,
                .summary = "Gradients of ortrain::LSTM; db is that of both biases.",
                .inputs = grad_inputs(kLstm, {"gates", "cells"}),
                .outputs = optional_values({"dx", "dh0", "dc0", "dw_ih", "dw_hh", "db"}),
                .attrs = layer_attributes(),
                .types = {{"T", kFloatTypes}},
                .infer = infer_layer_grad(kLstm, {4, 1}, 1),
                .gradient = nullptr,
                .flops = [](const NodeSpec& s) { return recurrence_flops(s, 3, 2, 2); }});
}

void register_gru(OpRegistry& registry) {
  const std::string own(kOrtrainDomain);
  registry.add({.name = "GRU",
                .domain = own,
                .summary =
                    "One GRU layer in one direction, gates in the order r z n, "
                    "n = tanh(w_in x + b_in + r * (w_hn h + b_hn)), h' = (1 - z) * n + z * h.",
                .inputs = forward_inputs(kGru),
                .outputs = optional_values({"y", "h_n", "gates"}),
                .attrs = layer_attributes(),
                .types = {{"T", kFloatTypes}},
                .precision = Precision::deny,
                .infer = infer_layer(kGru, {4}),
                .gradient = layer_gradient("GRUGrad", kGru, {2}, 2),
                .flops = [](const NodeSpec& s) { return recurrence_flops(s, 0, 1, 1); },
                .standard_form = recurrent_form("GRU", kGru, {1, 0, 2})});
  registry.add({.name = "GRUGrad",
                .domain = own,
                .summary = "Gradients of ortrain::GRU.",
                .inputs = grad_inputs(kGru, {"gates"}),
                .outputs = optional_values({"dx", "dh0", "dw_ih", "dw_hh", "db_ih", "db_hh"}),
                .attrs = layer_attributes(),
                .types = {{"T", kFloatTypes}},
                .infer = infer_layer_grad(kGru, {4}, 2),
                .gradient = nullptr,
                .flops = [](const NodeSpec& s) { return recurrence_flops(s, 2, 1, 2); }});
}

void check_activation(const InferContext& context) {
  const std::string& activation = context.attrs().string_("activation");
  if (activation != "tanh" && activation != "relu") {
    throw UnsupportedError(str("activation is '", activation, "'; it must be tanh or relu"));
  }
}

std::function<void(InferContext&)> with_activation(std::function<void(InferContext&)> infer) {
  return [infer = std::move(infer)](InferContext& context) {
    check_activation(context);
    infer(context);
  };
}

void register_plain(OpRegistry& registry) {
  const std::string own(kOrtrainDomain);
  std::vector<FormalAttribute> attributes = layer_attributes();
  attributes.push_back({"activation", std::string("tanh")});
  registry.add({.name = "RNN",
                .domain = own,
                .summary = "One recurrent layer in one direction: "
                           "h' = activation(w_ih x + b_ih + w_hh h + b_hh), tanh or relu.",
                .inputs = forward_inputs(kRnn),
                .outputs = optional_values({"y", "h_n"}),
                .attrs = attributes,
                .types = {{"T", kFloatTypes}},
                .precision = Precision::deny,
                .infer = with_activation(infer_layer(kRnn, {})),
                .gradient = layer_gradient("RNNGrad", kRnn, {}, 1),
                .flops = [](const NodeSpec& s) { return recurrence_flops(s, 0, 1, 1); },
                .standard_form = recurrent_form("RNN", kRnn, {0})});
  registry.add({.name = "RNNGrad",
                .domain = own,
                .summary = "Gradients of ortrain::RNN; db is that of both biases.",
                .inputs = grad_inputs(kRnn, {}),
                .outputs = optional_values({"dx", "dh0", "dw_ih", "dw_hh", "db"}),
                .attrs = attributes,
                .types = {{"T", kFloatTypes}},
                .infer = with_activation(infer_layer_grad(kRnn, {}, 1)),
                .gradient = nullptr,
                .flops = [](const NodeSpec& s) { return recurrence_flops(s, 2, 1, 2); }});
}

}  // namespace

void register_rnn(OpRegistry& registry) {
  register_lstm(registry);
  register_gru(registry);
  register_plain(registry);
}

}  // namespace ortrain::ops
