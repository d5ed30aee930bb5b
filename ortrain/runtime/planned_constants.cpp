// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/planned_constants.h"

#include <utility>

namespace ortrain {
namespace {

// A few bytes of a graph may not ask for any memory, nor for any time that computing takes.
constexpr size_t kMostResultBytes = size_t{128} << 20;

size_t index_of(ValueId id) { return static_cast<size_t>(id); }

}  // namespace

PlannedConstants::PlannedConstants(const Graph& graph)
    : graph_(graph), index_of_(graph.num_values(), -1), reads_left_(graph.num_values(), 0) {
  for (NodeId id : graph.order()) {
    for (ValueId input : graph.node(id).inputs) {
      if (input != kNoValue) ++reads_left_[index_of(input)];
    }
  }
  for (const GraphOutput& output : graph.outputs()) ++reads_left_[index_of(output.value)];
}

bool PlannedConstants::has(ValueId id) {
  if (index(id) >= 0) return true;
  const Value& value = graph_.value(id);
  if (value.kind != ValueKind::constant) return false;
  add(id, value.constant, /*is_result=*/false);
  return true;
}

const void* PlannedConstants::data(ValueId id) const {
  return index(id) < 0 ? nullptr : tensors_[static_cast<size_t>(index(id))].data();
}

bool PlannedConstants::have_room(ByteCount bytes) const {
  return bytes + bytes_of<char>(result_bytes_) <= bytes_of<char>(kMostResultBytes);
}

void PlannedConstants::add_result(ValueId id, TensorData data) {
  result_bytes_ += data.bytes();
  add(id, std::move(data), /*is_result=*/true);
}

void PlannedConstants::computed(const Node& node) {
  for (ValueId id : node.inputs) {
    if (id == kNoValue || --reads_left_[index_of(id)] > 0 || index(id) < 0) continue;
    drop(static_cast<size_t>(index(id)));
  }
}

void PlannedConstants::keep(const std::vector<bool>& is_read) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!is_read[i]) drop(i);
  }
}

void PlannedConstants::add(ValueId id, TensorData data, bool is_result) {
  index_of_[index_of(id)] = static_cast<int>(tensors_.size());
  tensors_.push_back(std::move(data));
  is_result_.push_back(is_result);
}

void PlannedConstants::drop(size_t index) {
  if (is_result_[index]) result_bytes_ -= tensors_[index].bytes();
  tensors_[index] = TensorData();
}

}  // namespace ortrain
