// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/loss.h"

#include <array>

#include "ortrain/base/error.h"
#include "ortrain/ir/graph_builder.h"

namespace ortrain {
namespace {

constexpr std::array<std::pair<std::string_view, Loss>, 4> kLosses{{
    {"cross_entropy", Loss::cross_entropy},
    {"mse", Loss::mean_squared},
    {"l1", Loss::mean_absolute},
    {"bce_with_logits", Loss::binary_logistic},
}};

const GraphOutput& find_output(const Graph& graph, const std::string& name) {
  const GraphOutput* found = nullptr;
  std::string names;
  int count = 0;
  for (const GraphOutput& output : graph.outputs()) {
    if (output.role != OutputRole::user) continue;
    ++count;
    names += (names.empty() ? "" : ", ") + output.name;
    if (name.empty() || output.name == name) found = &output;
  }
  if (name.empty() && count != 1) {
    throw InvalidModelError(str("the loss needs the name of its output, one of ", names));
  }
  if (found == nullptr) {
    throw InvalidModelError(str("there is no output '", name, "' for the loss; there are ", names));
  }
  return *found;
}

ValueId mean_of(GraphBuilder& builder, ValueId a) {
  return builder.op("ReduceMean", {a}, {{"keepdims", int64_t{0}}});
}

}  // namespace

Loss loss_from_name(std::string_view name) {
  std::string names;
  for (const auto& [known, loss] : kLosses) {
    if (known == name) return loss;
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  throw InvalidModelError(str("there is no loss '", name, "'; there are ", names));
}

void add_loss(Graph& graph, Loss loss, const std::string& output, const std::string& target,
              const std::string& name) {
  const GraphOutput predicted = find_output(graph, output);
  const Value value = graph.value(predicted.value);
  if (!is_float(value.dtype)) {
    throw InvalidModelError(
        str("output '", predicted.name, "' is ", name_of(value.dtype), ", a loss needs floats"));
  }
  for (const std::string& taken : {target, name}) {
    if (graph.find_value(taken) != kNoValue) {
      throw InvalidModelError(str("the model has a value '", taken, "' already"));
    }
  }
  GraphBuilder builder(graph);
  builder.set_layer(name);
  ValueId made = kNoValue;
  if (loss == Loss::cross_entropy) {
    Shape shape = value.shape;
    if (shape.empty()) {
      throw InvalidModelError(
          str("output '", predicted.name, "' is a scalar, which has no classes"));
    }
    shape.erase(shape.begin() + (shape.size() > 1 ? 1 : 0));
    const ValueId labels = graph.add_input({}, target, DType::i64, std::move(shape));
    made = builder.own("CrossEntropy", {predicted.value, labels});
  } else {
    const ValueId given = graph.add_input({}, target, value.dtype, value.shape);
    const ValueId x = predicted.value;
    if (loss == Loss::binary_logistic) {
      // x (1 - t) + log(1 + exp(-x)), with the derivative of Softplus, which has no kink at 0.
      const ValueId linear = builder.sub(x, builder.mul(x, given));
      made = mean_of(builder, builder.add(linear, builder.unary("Softplus", builder.neg(x))));
    } else {
      const ValueId difference = builder.sub(x, given);
      made = mean_of(builder, loss == Loss::mean_squared ? builder.mul(difference, difference)
                                                         : builder.unary("Abs", difference));
    }
  }
  graph.rename_value(made, name);
  graph.outputs().insert(graph.outputs().begin(), GraphOutput{.value = made, .name = name});
}

}  // namespace ortrain
