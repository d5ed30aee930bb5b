// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "fuzz/plan_rules.h"

#include <algorithm>
#include <map>
#include <utility>

#include "fuzz/answers.h"
#include "ortrain/plan/resolve_shapes.h"

namespace ortrain::fuzz {
namespace {

// No value is, and none has been written.
constexpr ValueId kWorkspace = -2;
constexpr ValueId kNothing = -3;

__extension__ using Wide = unsigned __int128;

// Stops far above what fits: extents are at most 2^63, so nothing wraps.
size_t exact_bytes(DType dtype, const Dims& dims) {
  Wide bytes = size_of(dtype);
  for (const int64_t dim : dims) {
    require(dim >= 0, str("a planned extent is ", dim));
    bytes *= static_cast<Wide>(dim);
    require(bytes <= static_cast<Wide>(kMostBytes), str("planned: ", dims_str(dims)));
  }
  return static_cast<size_t>(bytes);
}

// Who has written the bytes of one arena or block last.
class Owners {
 public:
  void write(size_t begin, size_t end, ValueId owner) {
    if (begin == end) return;
    split(begin);
    split(end);
    starts_.erase(starts_.lower_bound(begin), starts_.lower_bound(end));
    starts_[begin] = owner;
  }
  bool all(size_t begin, size_t end, ValueId owner) {
    if (begin == end) return true;
    split(begin);
    split(end);
    return std::all_of(starts_.lower_bound(begin), starts_.lower_bound(end),
                       [&](const auto& entry) { return entry.second == owner; });
  }

 private:
  void split(size_t at) {
    const auto after = starts_.upper_bound(at);
    starts_.emplace(at, std::prev(after)->second);
  }
  std::map<size_t, ValueId> starts_{{0, kNothing}};
};

struct Range {
  Location::Kind kind = Location::Kind::absent;
  uint32_t index = 0;
  size_t begin = 0, end = 0;

  bool overlaps(const Range& other) const {
    return kind == other.kind && index == other.index && begin < other.end && other.begin < end;
  }
};

class Follower {
 public:
  Follower(const Graph& graph, const std::vector<Dims>& input_dims, const ExecutionPlan& plan)
      : graph_(graph), plan_(plan), shapes_(resolve_shapes(graph, input_dims)) {
    for (size_t id = 0; id < graph.num_values(); ++id) root_.push_back(static_cast<ValueId>(id));
    for (const NodeId id : plan.views) {
      const Node& node = graph.node(id);
      for (const ValueId output : node.outputs) {
        if (output != kNoValue) root_[index(output)] = root_[index(node.inputs[0])];
      }
    }
    for (size_t k = 0; k < plan.outputs.size(); ++k) {
      require(plan.outputs[k].bytes() == bytes_of_value(graph.outputs()[k].value),
              str("output ", k, " has other bytes than its value"));
    }
  }

  std::vector<StepBytes> follow() {
    std::vector<StepBytes> result;
    for (size_t s = 0; s < plan_.steps.size(); ++s) result.push_back(follow_step(plan_.steps[s]));
    return result;
  }

 private:
  static size_t index(ValueId id) { return static_cast<size_t>(id); }

  size_t bytes_of_value(ValueId id) const {
    return id == kNoValue ? 0 : exact_bytes(graph_.value(id).dtype, shapes_.dims[index(id)]);
  }

  Range range_of(const Location& location, size_t bytes) const {
    const size_t room = [&]() -> size_t {
      switch (location.kind) {
        case Location::Kind::absent:
          return 0;
        case Location::Kind::input:
          return plan_.inputs.at(location.index).bytes();
        case Location::Kind::constant:
          return plan_.constants.at(location.index).bytes();
        case Location::Kind::arena:
          return plan_.arena_bytes;
        case Location::Kind::output:
          return plan_.outputs.at(location.index).bytes();
      }
      return 0;
    }();
    if (location.kind == Location::Kind::absent) return {};
    require(location.offset <= room && bytes <= room - location.offset,
            str("bytes from ", location.offset, " on, ", bytes, " of them, reach out of ", room));
    return {location.kind, location.index, location.offset, location.offset + bytes};
  }

  Owners* owners_of(const Range& range) {
    if (range.kind == Location::Kind::arena) return &arena_;
    if (range.kind == Location::Kind::output) return &blocks_[range.index];
    return nullptr;
  }

  void read(const Range& range, ValueId value, const std::string& where) {
    Owners* const owners = owners_of(range);
    if (owners == nullptr) return;
    require(owners->all(range.begin, range.end, root_[index(value)]),
            str(where, "reads '", graph_.value(value).name, "' where another value lies"));
  }

  StepBytes follow_step(const PlanStep& step) {
    const Location* const args = plan_.args.data() + step.first_arg;
    if (step.node == kNoNode) return follow_copy(args);
    const Node& node = graph_.node(step.node);
    const std::string where = Graph::context(node);
    StepBytes bytes{.inputs = {}, .outputs = {}, .workspace = step.workspace_bytes};
    std::vector<Range> read_ranges, written;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      bytes.inputs.push_back(bytes_of_value(node.inputs[i]));
      const Range range = range_of(args[i], bytes.inputs.back());
      if (node.inputs[i] != kNoValue) read(range, node.inputs[i], where);
      read_ranges.push_back(range);
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      bytes.outputs.push_back(bytes_of_value(node.outputs[i]));
      written.push_back(range_of(args[node.inputs.size() + i], bytes.outputs.back()));
    }
    const Location& workspace = args[node.inputs.size() + node.outputs.size()];
    if (workspace.kind == Location::Kind::absent) {
      bytes.workspace = 0;
    } else {
      written.push_back(range_of(workspace, bytes.workspace));
    }
    for (size_t i = 0; i < written.size(); ++i) {
      const bool is_workspace = i == node.outputs.size();
      for (const Range& input : read_ranges) {
        require(!written[i].overlaps(input) || (!is_workspace && written[i].begin == input.begin),
                where + "writes over an input");
      }
      for (size_t j = 0; j < i; ++j) {
        require(!written[i].overlaps(written[j]), where + "writes over its own results");
      }
      Owners* const owners = owners_of(written[i]);
      if (owners == nullptr) continue;
      owners->write(written[i].begin, written[i].end, is_workspace ? kWorkspace : node.outputs[i]);
    }
    return bytes;
  }

  StepBytes follow_copy(const Location* args) {
    require(args[1].kind == Location::Kind::output, "a copy goes elsewhere than into an output");
    const size_t bytes = plan_.outputs.at(args[1].index).bytes();
    const ValueId value = graph_.outputs()[args[1].index].value;
    read(range_of(args[0], bytes), value, "a copy ");
    const Range range = range_of(args[1], bytes);
    owners_of(range)->write(range.begin, range.end, root_[index(value)]);
    return {{bytes}, {bytes}, 0};
  }

  const Graph& graph_;
  const ExecutionPlan& plan_;
  const ResolvedShapes shapes_;
  std::vector<ValueId> root_;
  Owners arena_;
  std::map<uint32_t, Owners> blocks_;
};

}  // namespace

std::vector<StepBytes> check_plan(const Graph& graph, const std::vector<Dims>& input_dims,
                                  const ExecutionPlan& plan) {
  return Follower(graph, input_dims, plan).follow();
}

}  // namespace ortrain::fuzz
