// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/join_casts.h"

#include <map>
#include <optional>
#include <utility>

#include "ortrain/ir/graph_builder.h"
#include "ortrain/passes/pass_notes.h"

namespace ortrain {
namespace {

constexpr int64_t kMostBytes = int64_t{32} << 20;
constexpr size_t kMostCasts = 96;  // of one launch, see ops/elementwise/cast_each.cu

// The bytes of a value; nullopt where an extent is open.
std::optional<int64_t> bytes_of_value(const Value& value) {
  int64_t bytes = static_cast<int64_t>(size_of(value.dtype));
  for (const Dim& extent : value.shape) {
    if (!extent.is_constant()) return std::nullopt;
    bytes *= extent.constant();
    if (bytes > kMostBytes) return std::nullopt;
  }
  return bytes;
}

struct Group {
  std::vector<NodeId> casts;
  int64_t bytes = 0;
};

class CastJoiner {
 public:
  explicit CastJoiner(Graph& graph) : graph_(graph), builder_(graph) {}

  bool run() {
    const std::vector<NodeId> order = graph_.order();
    for (NodeId id : order) {
      const Node& node = graph_.node(id);
      if (node.op != "Cast" || !node.domain.empty() || node.phase != Phase::forward ||
          node.checkpoint != 0) {
        continue;
      }
      const Value& from = graph_.value(node.inputs[0]);
      const Value& to = graph_.value(node.outputs[0]);
      if (from.kind != ValueKind::input || !is_float(from.dtype) || !is_float(to.dtype)) continue;
      const std::optional<int64_t> bytes = bytes_of_value(to);
      if (!bytes) continue;
      Group& group = groups_[{from.dtype, to.dtype}];
      if (group.bytes + *bytes > kMostBytes || group.casts.size() == kMostCasts) join(group);
      group.casts.push_back(id);
      group.bytes += *bytes;
    }
    for (auto& [types, group] : groups_) join(group);
    return changed_;
  }

 private:
  void join(Group& group) {
    const std::vector<NodeId> casts = std::move(group.casts);
    group = {};
    if (casts.size() < 2) return;
    std::vector<ValueId> inputs;
    for (NodeId id : casts) inputs.push_back(graph_.node(id).inputs[0]);
    const Node first = graph_.node(casts[0]);
    builder_.set_phase(first.phase);
    builder_.set_layer(first.name);
    builder_.set_checkpoint(first.checkpoint);
    const std::vector<ValueId> made =
        builder_.node(std::string(kOrtrainDomain), "CastEach", std::move(inputs),
                      {{"to", first.attributes.at("to")}}, std::vector<bool>(casts.size(), true));
    if (PassNotes* notes = PassNotes::current()) {
      notes->taken(graph_, graph_.value(made[0]).producer, casts);
    }
    for (size_t i = 0; i < casts.size(); ++i) {
      graph_.replace_uses(graph_.node(casts[i]).outputs[0], made[i]);
    }
    changed_ = true;
  }

  Graph& graph_;
  GraphBuilder builder_;
  std::map<std::pair<DType, DType>, Group> groups_;
  bool changed_ = false;
};

}  // namespace

Pass join_casts() {
  return {.name = "join_casts",
          .summary = "On GPUs, casts of weights go together, in few launches.",
          .run = [](Graph& graph) { return CastJoiner(graph).run(); },
          .of_gpus = true,
          .takes_memory = true};
}

}  // namespace ortrain
