// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>

#include "ortrain/ir/graph.h"
#include "ortrain/ir/node_spec.h"
#include "ortrain/runtime/device.h"

namespace ortrain {

// Follows one run and remembers where the first NaN came from (ORTRAIN_CHECK_NAN). Values that
// nothing reads, or that a mask hides, may hold NaN in a sound model: only a result of the graph
// that holds one is an error.
class NanCheck {
 public:
  // `device` has the values, of work on `stream`. Not on the host: they are copied for each look.
  explicit NanCheck(Device& device = host_device(), void* stream = nullptr)
      : device_(&device), stream_(stream) {}

  // An input of the graph, before the first node runs.
  void see_input(const Graph& graph, const GraphInput& input, const TensorSpec& spec,
                 const void* data);
  // What a node has made: one address per output, null where it is absent.
  void see_node(const Node& node, std::span<const TensorSpec> specs, void* const* outputs);
  // Throws NanError naming the result and the node or input of the first NaN.
  void require_numbers(const GraphOutput& output, const TensorSpec& spec, const void* data) const;

 private:
  struct Found {
    int64_t count = 0;
    int64_t first = 0;  // position in memory order
  };
  Found find_nan(const TensorSpec& spec, const void* data) const;
  static std::string described(const TensorSpec& spec, Found found);

  Device* device_;
  void* stream_;
  std::string first_;  // empty until there is one
};

}  // namespace ortrain
