// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/node_cost.h"

#include <algorithm>
#include <functional>
#include <map>
#include <string>

namespace ortrain {
namespace {

double numel(const TensorSpec& spec) { return static_cast<double>(spec.numel()); }

// Extent `from_end` places from the end, 1 = the last one; 1 beyond the rank.
double extent(const TensorSpec& spec, size_t from_end) {
  const size_t rank = spec.dims.size();
  return rank < from_end ? 1.0 : static_cast<double>(spec.dims[rank - from_end]);
}

double product_flops(const NodeSpec& spec, const char* transposed) {
  const bool trans_a = transposed != nullptr && spec.attrs().int_(transposed) != 0;
  return 2 * numel(spec.output(0)) * extent(spec.input(0), trans_a ? 2 : 1);
}

// Multiplications per element of the convolution's result: weights of one output channel.
double filter_size(const TensorSpec& weight) {
  return weight.dims.empty() || weight.dims[0] == 0
             ? 0.0
             : numel(weight) / static_cast<double>(weight.dims[0]);
}

// `products` of queries with keys or of probabilities with values, causal ones by half.
double attention_flops(const NodeSpec& spec, size_t q, double products) {
  const TensorSpec& keys = spec.input(q + 1);
  const double length = extent(keys, 2);  // [b, h, s, d] or [b, s, h * d]
  const double causal = spec.attrs().int_("is_causal") != 0 ? 0.5 : 1.0;
  return causal * products * 2 * numel(spec.input(q)) * length;
}

// Inputs from `x` on: x[time, batch, in], `states` initial states, w_ih, w_hh.
double recurrence_flops(const NodeSpec& spec, size_t x, size_t states, double products) {
  const double steps = numel(spec.input(x)) / std::max(extent(spec.input(x), 1), 1.0);
  return products * 2 * steps *
         (numel(spec.input(x + 1 + states)) + numel(spec.input(x + 2 + states)));
}

using Rule = std::function<double(const NodeSpec&)>;

const std::map<std::string, Rule>& flop_rules() {
  static const std::map<std::string, Rule> rules{
      {"MatMul", [](const NodeSpec& s) { return product_flops(s, nullptr); }},
      {"FusedMatMul", [](const NodeSpec& s) { return product_flops(s, "transA"); }},
      {"Gemm", [](const NodeSpec& s) { return product_flops(s, "transA"); }},
      {"Linear", [](const NodeSpec& s) { return product_flops(s, nullptr); }},
      {"LinearInputGrad", [](const NodeSpec& s) { return product_flops(s, nullptr); }},
      {"LinearWeightGrad",
       [](const NodeSpec& s) { return 2 * numel(s.input(0)) * extent(s.input(1), 1); }},
      // All rows; those without a label are skipped.
      {"ClassifierLossGrad",
       [](const NodeSpec& s) { return 4 * numel(s.input(1)) * extent(s.input(5), 1); }},
      {"GroupedMatMul", [](const NodeSpec& s) { return product_flops(s, nullptr); }},
      {"GroupedMatMulWeightGrad",
       [](const NodeSpec& s) { return 2 * numel(s.input(0)) * extent(s.input(1), 1); }},
      {"Conv", [](const NodeSpec& s) { return 2 * numel(s.output(0)) * filter_size(s.input(1)); }},
      {"ConvInputGrad",
       [](const NodeSpec& s) { return 2 * numel(s.input(0)) * filter_size(s.input(1)); }},
      {"ConvWeightGrad",
       [](const NodeSpec& s) { return 2 * numel(s.input(0)) * filter_size(s.output(0)); }},
      {"ConvTranspose",
       [](const NodeSpec& s) { return 2 * numel(s.input(0)) * filter_size(s.input(1)); }},
      {"Attention", [](const NodeSpec& s) { return attention_flops(s, 0, 2); }},
      // The scores again, dp, dq, dk, dv.
      {"AttentionGrad", [](const NodeSpec& s) { return attention_flops(s, 1, 5); }},
      {"RNN", [](const NodeSpec& s) { return recurrence_flops(s, 0, 1, 1); }},
      {"RNNGrad", [](const NodeSpec& s) { return recurrence_flops(s, 2, 1, 2); }},
      {"GRU", [](const NodeSpec& s) { return recurrence_flops(s, 0, 1, 1); }},
      {"GRUGrad", [](const NodeSpec& s) { return recurrence_flops(s, 2, 1, 2); }},
      {"LSTM", [](const NodeSpec& s) { return recurrence_flops(s, 0, 2, 1); }},
      {"LSTMGrad", [](const NodeSpec& s) { return recurrence_flops(s, 3, 2, 2); }},
  };
  return rules;
}

}  // namespace

NodeCost node_cost(const NodeSpec& spec) {
  NodeCost cost;
  double out = 0;
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    if (spec.has_output(i)) out += static_cast<double>(spec.output(i).bytes());
  }
  const std::string& op = spec.node().op;
  const bool looks_up =
      op == "Embedding" || op == "Slice" || (op.starts_with("Gather") && !op.ends_with("Grad"));
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    if (!spec.has_input(i)) continue;
    const double in = static_cast<double>(spec.input(i).bytes());
    cost.bytes += looks_up && i == 0 ? std::min(in, out) : in;
  }
  cost.bytes += out;
  if (auto rule = flop_rules().find(op); rule != flop_rules().end())
    cost.flops = rule->second(spec);
  return cost;
}

}  // namespace ortrain
