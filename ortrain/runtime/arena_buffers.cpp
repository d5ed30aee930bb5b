// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/arena_buffers.h"

#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace ortrain {
namespace {

class Sweep {
 public:
  Sweep(const Graph& graph, const ExecutionPlan& plan) : graph_(graph), plan_(plan) {}

  std::vector<ArenaBuffer> run() {
    for (size_t i = 0; i < plan_.steps.size(); ++i) visit(static_cast<int>(i), plan_.steps[i]);
    return std::move(buffers_);
  }

 private:
  // The buffer that holds a byte of the arena at this point, or -1.
  int buffer_at(size_t offset) const {
    auto found = alive_.upper_bound(offset);
    if (found == alive_.begin()) return -1;
    const int index = std::prev(found)->second;
    const ArenaBuffer& buffer = buffers_[static_cast<size_t>(index)];
    return offset < buffer.offset + buffer.bytes ? index : -1;
  }

  void begin(ArenaBuffer buffer) {
    if (buffer.bytes == 0) return;
    // What it lies on has been read for the last time.
    auto gone = alive_.lower_bound(buffer.offset);
    if (const int before = buffer_at(buffer.offset); before >= 0) {
      gone = alive_.find(buffers_[static_cast<size_t>(before)].offset);
    }
    while (gone != alive_.end() && gone->first < buffer.offset + buffer.bytes) {
      gone = alive_.erase(gone);
    }
    alive_[buffer.offset] = static_cast<int>(buffers_.size());
    buffers_.push_back(buffer);
  }

  void visit(int number, const PlanStep& step) {
    const Location* const args = plan_.args.data() + step.first_arg;
    for (uint32_t i = 0; i < step.num_inputs; ++i) {
      if (args[i].kind != Location::Kind::arena) continue;
      if (step.node != kNoNode && empty_.contains(graph_.node(step.node).inputs[i])) continue;
      if (const int read = buffer_at(args[i].offset); read >= 0) {
        buffers_[static_cast<size_t>(read)].last_step = number;
      }
    }
    for (uint32_t k = 0; k < step.outputs.size(); ++k) {
      const Location& location = args[step.num_inputs + k];
      if (location.kind != Location::Kind::arena) continue;
      const size_t bytes = step.outputs[k].bytes();
      if (bytes == 0) empty_.insert(graph_.node(step.node).outputs[k]);
      const int held = buffer_at(location.offset);
      ArenaBuffer* const buffer = held < 0 ? nullptr : &buffers_[static_cast<size_t>(held)];
      if (buffer != nullptr && buffer->last_step == number && buffer->offset == location.offset &&
          buffer->bytes == bytes) {
        ++buffer->num_values;  // in place of an input
        continue;
      }
      begin({.value = graph_.node(step.node).outputs[k],
             .step = number,
             .last_step = number,
             .offset = location.offset,
             .bytes = bytes});
    }
    const Location& workspace = args[step.num_inputs + step.num_outputs];
    if (workspace.kind != Location::Kind::arena) return;
    begin({.step = number,
           .last_step = number,
           .offset = workspace.offset,
           .bytes = step.workspace_bytes});
  }

  const Graph& graph_;
  const ExecutionPlan& plan_;
  std::vector<ArenaBuffer> buffers_;
  std::map<size_t, int> alive_;  // by offset: index of the latest buffer there
  std::set<ValueId> empty_;      // share their place with whatever is there
};

}  // namespace

std::vector<ArenaBuffer> arena_buffers(const Graph& graph, const ExecutionPlan& plan) {
  return Sweep(graph, plan).run();
}

}  // namespace ortrain
