// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

namespace ortrain::ops {

// The standard Dropout node with its inputs resolved.
struct OnnxDropout {
  bool training = false;
  double ratio = 0.0;
  int64_t seed = 0;
};

// nullopt: not known before the graph runs. Throws UnsupportedError if that or a missing seed makes
// the node impossible, InvalidModelError for a ratio outside of [0, 1).
OnnxDropout onnx_dropout(std::optional<double> ratio, std::optional<bool> training,
                         std::optional<int64_t> seed);

}  // namespace ortrain::ops
