// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "ortrain/ir/graph.h"

namespace ortrain {

enum class Loss {
  cross_entropy,    // of softmax(output [N, C, d...]) and int64 classes [N, d...], -100 ignored
  mean_squared,     // mean of (output - target)^2
  mean_absolute,    // mean of |output - target|
  binary_logistic,  // mean of the cross entropy of sigmoid(output) and target (from 0 to 1)
};

// "cross_entropy", "mse", "l1", "bce_with_logits"; throws InvalidModelError for other names.
Loss loss_from_name(std::string_view name);

// Adds a user input `target`, of the shape and type that the loss takes, and a user output `loss`,
// a scalar, which comes first. `output`: the name of a user output; empty where there is only one.
// Throws InvalidModelError for an output that there is not, or names that are taken.
void add_loss(Graph& graph, Loss loss, const std::string& output, const std::string& target,
              const std::string& name);

}  // namespace ortrain
