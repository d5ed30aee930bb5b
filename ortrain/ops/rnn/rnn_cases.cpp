// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

struct Layer {
  const char* op;
  int64_t gates;
  size_t states;
  std::vector<int64_t> saved;  // blocks of hidden size per step
  size_t biases;               // bias gradients of the gradient operator
};

const std::vector<Layer>& layers() {
  static const std::vector<Layer> kLayers = {{"ortrain::LSTM", 4, 2, {4, 1}, 1},
                                             {"ortrain::GRU", 3, 1, {4}, 2},
                                             {"ortrain::RNN", 1, 1, {}, 1}};
  return kLayers;
}

struct Size {
  const char* name;
  int64_t steps, batch, input, hidden;
};

std::vector<CaseInput> forward_inputs(const Layer& layer, const Size& s, bool b_ih, bool b_hh) {
  const int64_t width = layer.gates * s.hidden;
  // So small that the gates do not saturate.
  const double most = std::min(0.6, 2 / std::sqrt(static_cast<double>(s.hidden)));
  const auto weight = [&](Dims dims) { return CaseInput::uniform(std::move(dims), -most, most); };
  std::vector<CaseInput> inputs = {CaseInput::normal({s.steps, s.batch, s.input})};
  for (size_t i = 0; i < layer.states; ++i)
    inputs.push_back(CaseInput::normal({s.batch, s.hidden}));
  inputs.push_back(weight({width, s.input}));
  inputs.push_back(weight({width, s.hidden}));
  inputs.push_back(b_ih ? weight({width}) : CaseInput::none());
  inputs.push_back(b_hh ? weight({width}) : CaseInput::none());
  return inputs;
}

std::vector<CaseInput> grad_inputs(const Layer& layer, const Size& s) {
  const Dims state{s.batch, s.hidden}, sequence{s.steps, s.batch, s.hidden};
  // Kernels round what the 16-bit types sum over all rows: little beside 1, which tolerances are
  // relative to.
  const double most = s.steps * s.batch > 15 ? 0.1 : 0.5;
  std::vector<CaseInput> inputs = {CaseInput::uniform(sequence, -most, most)};
  for (size_t i = 0; i < layer.states; ++i) {
    inputs.push_back(CaseInput::uniform(state, -most, most));
  }
  std::vector<CaseInput> forward = forward_inputs(layer, s, false, false);
  forward.resize(forward.size() - 2);
  inputs.insert(inputs.end(), forward.begin(), forward.end());
  // Saved values lie in (0, 1), as gates do.
  inputs.push_back(CaseInput::uniform(sequence, -0.9, 0.9));
  for (int64_t blocks : layer.saved) {
    inputs.push_back(CaseInput::uniform({s.steps, s.batch, blocks * s.hidden}, 0.1, 0.9));
  }
  return inputs;
}

void add_grad(CaseRegistry& cases, const Layer& layer, const Size& s, const std::string& name,
              Attributes attributes) {
  cases.add({.op = std::string(layer.op) + "Grad",
             .name = name,
             .inputs = grad_inputs(layer, s),
             .attributes = std::move(attributes),
             .outputs = 1 + layer.states + 2 + layer.biases});
}

void add_layer(CaseRegistry& cases, const Layer& layer, const Size& s, const std::string& name,
               Attributes attributes) {
  const size_t states = 1 + layer.states;
  std::vector<size_t> with_gradient;
  for (size_t i = 0; i < states; ++i) with_gradient.push_back(i);
  cases.add({.op = layer.op,
             .name = name,
             .inputs = forward_inputs(layer, s, true, true),
             .attributes = attributes,
             .outputs = states + layer.saved.size(),
             .gradient_outputs = with_gradient});
  add_grad(cases, layer, s, name, attributes);
}

// Gradients of y alone, of the last states alone, of nothing; results that nobody wants.
void add_unwanted(CaseRegistry& cases, const Layer& layer) {
  const Size s{"", 4, 2, 3, 5};
  const std::string op = std::string(layer.op) + "Grad";
  const std::vector<CaseInput> inputs = grad_inputs(layer, s);
  const size_t outputs = 1 + layer.states + 2 + layer.biases;
  for (const bool reverse : {false, true}) {
    const Attributes attributes{{"reverse", int64_t{reverse}}};
    const std::string suffix = reverse ? "_reverse" : "";
    std::vector<CaseInput> of_y = inputs, of_states = inputs, of_nothing = inputs;
    for (size_t i = 1; i <= layer.states; ++i) of_y[i] = of_nothing[i] = CaseInput::none();
    of_states[0] = of_nothing[0] = CaseInput::none();
    const auto add = [&](const char* name, const std::vector<CaseInput>& of, size_t wanted) {
      cases.add({.op = op,
                 .name = name + suffix,
                 .inputs = of,
                 .attributes = attributes,
                 .outputs = wanted});
    };
    add("of_y", of_y, outputs);
    add("of_states", of_states, outputs);
    add("of_nothing", of_nothing, outputs);
    add("dx_alone", inputs, 1);
  }
}

}  // namespace

void register_rnn(CaseRegistry& cases) {
  const std::vector<Size> sizes = {{"odd", 5, 3, 7, 9},         {"single_step", 1, 2, 3, 4},
                                   {"two_steps", 2, 1, 1, 1},   {"seventeen", 3, 2, 17, 8},
                                   {"empty_batch", 3, 0, 2, 4}, {"no_steps", 0, 2, 3, 4}};
  for (const Layer& layer : layers()) {
    for (const Size& size : sizes) {
      add_layer(cases, layer, size, size.name, {});
      add_layer(cases, layer, size, std::string(size.name) + "_reverse", {{"reverse", int64_t{1}}});
    }
    const Size size{"", 4, 2, 3, 5};
    cases.add(
        {.op = layer.op, .name = "no_bias", .inputs = forward_inputs(layer, size, false, false)});
    cases.add({.op = layer.op,
               .name = "hidden_bias",
               .inputs = forward_inputs(layer, size, false, true),
               .attributes = {{"hidden_size", int64_t{5}}}});
    cases.add({.op = layer.op,
               .name = "wrong_hidden_size",
               .inputs = forward_inputs(layer, size, true, true),
               .attributes = {{"hidden_size", int64_t{6}}},
               .refusal = "hidden_size is 6"});
    std::vector<CaseInput> wrong = forward_inputs(layer, size, true, true);
    wrong[1] = CaseInput::normal({3, 5});
    cases.add({.op = layer.op, .name = "wrong_state", .inputs = wrong, .refusal = "h0 is [3, 5]"});
  }
  for (const Layer& layer : layers()) add_unwanted(cases, layer);
  // More than a tile of a matrix product in every direction; rounding over many steps.
  for (const Layer& layer : layers()) {
    for (const Size& size : {Size{"wide", 3, 5, 70, 131}, Size{"many_rows", 4, 67, 9, 33},
                             Size{"some_rows", 3, 7, 4, 9}, Size{"eleven_rows", 3, 11, 4, 9},
                             Size{"thirty_rows", 4, 30, 5, 33}, Size{"many_steps", 100, 2, 2, 3}}) {
      for (const bool reverse : {false, true}) {
        const Attributes attributes{{"reverse", int64_t{reverse}}};
        const std::string name = str(size.name, reverse ? "_reverse" : "");
        cases.add({.op = layer.op,
                   .name = name,
                   .inputs = forward_inputs(layer, size, true, true),
                   .attributes = attributes,
                   .outputs = 1 + layer.states + layer.saved.size(),
                   .check_gradient = false});
        add_grad(cases, layer, size, name, attributes);
      }
    }
  }
  const Layer& plain = layers()[2];
  add_layer(cases, plain, {"", 5, 3, 7, 9}, "relu", {{"activation", std::string("relu")}});
  add_layer(cases, plain, {"", 3, 2, 2, 8}, "relu_reverse",
            {{"activation", std::string("relu")}, {"reverse", int64_t{1}}});
  cases.add({.op = plain.op,
             .name = "unknown_activation",
             .inputs = forward_inputs(plain, {"", 2, 2, 2, 2}, true, true),
             .attributes = {{"activation", std::string("sigmoid")}},
             .refusal = "activation is 'sigmoid'"});
}

}  // namespace ortrain::testing
