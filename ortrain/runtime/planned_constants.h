// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "ortrain/base/byte_count.h"
#include "ortrain/ir/graph.h"
#include "ortrain/ir/tensor_data.h"

namespace ortrain {

// The values that are known while a plan of a graph is made: the graph's constants as they are
// asked for, and results that are computed of them. What only computed results have read is given
// up as soon as they are there.
class PlannedConstants {
 public:
  explicit PlannedConstants(const Graph& graph);

  // Whether the value is known.
  bool has(ValueId id);
  // Its elements; null where it is not known.
  const void* data(ValueId id) const;
  // Its place among all; -1 where it is not known.
  int index(ValueId id) const { return index_of_[static_cast<size_t>(id)]; }

  // Whether there is room for further results: those that are still wanted are bounded together.
  bool have_room(ByteCount bytes) const;
  void add_result(ValueId id, TensorData data);
  // The results of a node were added: it will not read its inputs any more.
  void computed(const Node& node);
  // Gives up all but those at the places where `is_read` holds.
  void keep(const std::vector<bool>& is_read);

  size_t size() const { return tensors_.size(); }
  // Of the results that are held.
  size_t result_bytes() const { return result_bytes_; }
  std::vector<TensorData> take() { return std::move(tensors_); }

 private:
  void add(ValueId id, TensorData data, bool is_result);
  void drop(size_t index);

  const Graph& graph_;
  std::vector<int> index_of_;    // by value
  std::vector<int> reads_left_;  // by value: of nodes that are not computed, and of outputs
  std::vector<TensorData> tensors_;
  std::vector<bool> is_result_;  // by place
  size_t result_bytes_ = 0;
};

}  // namespace ortrain
