// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/plan_verifier.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/ir/roles.h"
#include "ortrain/plan/memory_planner.h"
#include "ortrain/plan/resolve_shapes.h"

namespace ortrain {
namespace {

using Kind = Location::Kind;

__extension__ using Wide = unsigned __int128;

size_t index_of(ValueId id) { return static_cast<size_t>(id); }

void require(bool holds, const std::string& rule) {
  if (!holds) throw InternalError("plan: " + rule);
}

// Stops far above what fits: extents are at most 2^63, so nothing wraps.
size_t exact_bytes(DType dtype, const Dims& dims) {
  Wide bytes = size_of(dtype);
  for (const int64_t dim : dims) {
    require(dim >= 0, str("an extent is ", dim));
    bytes *= static_cast<Wide>(dim);
    require(bytes <= static_cast<Wide>(kMostBytes), dims_str(dims));
  }
  return static_cast<size_t>(bytes);
}

// A value, and where in the memory its byte 0 lies.
struct Owner {
  static constexpr ValueId kNothing = -2, kWorkspace = -3;
  ValueId value = kNothing;
  size_t start = 0;

  bool operator==(const Owner&) const = default;
};

// Who has written the bytes of one piece of memory last.
class Owners {
 public:
  void write(size_t begin, size_t end, Owner owner) {
    if (begin == end) return;
    split(begin);
    split(end);
    from_.erase(from_.lower_bound(begin), from_.lower_bound(end));
    from_[begin] = owner;
  }

  bool all(size_t begin, size_t end, Owner owner) const {
    if (begin == end) return true;
    for (auto part = std::prev(from_.upper_bound(begin)); part != from_.end(); ++part) {
      if (part->first >= end) break;
      if (part->second != owner) return false;
    }
    return true;
  }

 private:
  void split(size_t at) {
    const auto after = from_.upper_bound(at);
    from_.emplace(at, std::prev(after)->second);
  }

  std::map<size_t, Owner> from_{{0, Owner()}};
};

struct Range {
  Location::Kind kind = Kind::absent;
  uint32_t index = 0;
  size_t begin = 0, end = 0;

  bool overlaps(const Range& other) const {
    return kind == other.kind && index == other.index && begin < other.end && other.begin < end;
  }
};

class Follower {
 public:
  Follower(const Graph& graph, const std::vector<Dims>& input_dims, const ExecutionPlan& plan)
      : graph_(graph),
        plan_(plan),
        shapes_(resolve_shapes(graph, input_dims)),
        offset_(graph.num_values(), 0),
        made_by_step_(graph.num_values(), false),
        inputs_(graph.inputs().size()),
        blocks_(graph.outputs().size()),
        copied_(graph.outputs().size(), false),
        updated_by_(graph.inputs().size()) {
    for (size_t id = 0; id < graph.num_values(); ++id) root_.push_back(static_cast<ValueId>(id));
    for (const PlanView& view : plan.views) {
      const Node& node = graph.node(view.node);
      require(view.offsets.size() == node.outputs.size(), "a view has too few offsets");
      require(!node.inputs.empty() && node.inputs[0] != kNoValue, "a view shows nothing");
      for (size_t i = 0; i < node.outputs.size(); ++i) {
        if (node.outputs[i] == kNoValue) continue;
        const size_t source = index_of(node.inputs[0]), shown = index_of(node.outputs[i]);
        require(view.offsets[i] >= 0 && view.offsets[i] <= kMostBytes,
                "a view begins outside of what it shows");
        root_[shown] = root_[source];
        offset_[shown] = offset_[source] + static_cast<size_t>(view.offsets[i]);
        require(offset_[shown] + bytes_of_value(node.outputs[i]) <= bytes_of_value(root_[shown]),
                Graph::context(node) + "its result does not lie in what it shows");
      }
    }
    for (const PlanStep& step : plan.steps) {
      if (step.node == kNoNode) continue;
      for (const ValueId id : graph.node(step.node).outputs) {
        if (id == kNoValue) continue;
        require(!made_by_step_[index_of(id)], "a node runs twice");
        made_by_step_[index_of(id)] = true;
      }
    }
    require(plan.outputs.size() == blocks_.size() && plan.inputs.size() == inputs_.size(),
            "its inputs or outputs are not those of the graph");
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const ValueId value = graph.inputs()[i].value;
      require(plan.inputs[i].bytes() == bytes_of_value(value), "an input has other bytes");
      inputs_[i].write(0, plan.inputs[i].bytes(), {value, 0});
    }
    for (size_t k = 0; k < blocks_.size(); ++k) {
      require(plan.outputs[k].bytes() == bytes_of_value(graph.outputs()[k].value),
              str("output ", k, " has other bytes than its value"));
    }
    find_updates();
  }

  std::vector<StepBytes> follow() {
    std::vector<StepBytes> result;
    require(plan_.num_forward_steps <= plan_.steps.size(), "more forward steps than steps");
    for (step_ = 0; step_ < plan_.steps.size(); ++step_) {
      if (step_ == plan_.num_forward_steps) check_outputs(false);
      result.push_back(follow_step(plan_.steps[step_]));
    }
    if (plan_.num_forward_steps == plan_.steps.size()) check_outputs(false);
    check_outputs(true);
    check_handed_over();
    check_staging();
    return result;
  }

 private:
  bool in_backward() const { return step_ >= plan_.num_forward_steps; }
  bool is_gradient(size_t output) const {
    return graph_.outputs()[output].role == OutputRole::gradient;
  }

  size_t bytes_of_value(ValueId id) const {
    return id == kNoValue ? 0 : exact_bytes(graph_.value(id).dtype, shapes_.dims[index_of(id)]);
  }

  // What becomes of an input is the output that names it.
  void find_updates() {
    require(plan_.updated_input.size() == blocks_.size(), "not all outputs are told of");
    for (size_t k = 0; k < blocks_.size(); ++k) {
      if (plan_.updated_input[k] < 0) continue;
      const auto input = static_cast<size_t>(plan_.updated_input[k]);
      require(input < inputs_.size() && !updated_by_[input] &&
                  graph_.inputs()[input].target == graph_.outputs()[k].target &&
                  plan_.inputs[input] == plan_.outputs[k],
              str("output '", graph_.outputs()[k].name, "' updates what it does not name"));
      updated_by_[input] = k;
    }
  }

  // The bytes of a value at a location. Where it is written alignment counts, as what is read may
  // be a part of something.
  Range range_of(const Location& location, size_t bytes, const std::string& where,
                 bool written) const {
    const size_t room = [&]() -> size_t {
      switch (location.kind) {
        case Kind::absent:
          return 0;
        case Kind::input:
          return plan_.inputs.at(location.index).bytes();
        case Kind::constant:
          return plan_.constants.at(location.index).bytes();
        case Kind::arena:
          return plan_.arena_bytes;
        case Kind::output:
          return plan_.outputs.at(location.index).bytes();
      }
      return 0;
    }();
    if (location.kind == Kind::absent) return {};
    require(location.offset <= room && bytes <= room - location.offset,
            str(where, "bytes from ", location.offset, " on, ", bytes, " of them, reach out of ",
                room));
    require(!written || location.offset % kArenaAlignment == 0,
            str(where, "writes from byte ", location.offset, " on, which is not aligned"));
    return {location.kind, location.index, location.offset, location.offset + bytes};
  }

  Owners& owners_of(const Range& range) {
    if (range.kind == Kind::arena) return arena_;
    return range.kind == Kind::output ? blocks_[range.index] : inputs_[range.index];
  }

  void read(const Range& range, ValueId value, const std::string& where) {
    const size_t root = index_of(root_[index_of(value)]), offset = offset_[index_of(value)];
    const std::string named = str(where, "reads '", graph_.value(value).name, "' ");
    if (range.kind == Kind::absent) throw InternalError(named + "from nowhere");
    if (range.kind == Kind::constant) {
      require(!made_by_step_[root], named + "which a step makes, from a constant");
      require(range.begin == offset, named + "from another place of a constant");
      const auto [known, is_first] = constant_of_.emplace(root_[index_of(value)], range.index);
      require(known->second == range.index, named + "from two constants");
      const auto [owner, is_new] = value_of_.emplace(range.index, root_[index_of(value)]);
      require(owner->second == root_[index_of(value)], named + "from another one's constant");
      if (is_first) check_constant(root_[index_of(value)], plan_.constants[range.index], named);
      return;
    }
    if (range.kind == Kind::input) {
      const InputRole role = graph_.inputs()[range.index].role;
      require(role != InputRole::gradient || in_backward(), named + "before the backward");
    }
    if (range.begin == range.end) return;
    require(range.begin >= offset &&
                owners_of(range).all(range.begin, range.end,
                                     {root_[index_of(value)], range.begin - offset}),
            named + "where another value, or another part of it, lies");
  }

  // The elements of what is no constant of the graph are known where they follow from shapes.
  void check_constant(ValueId id, const TensorData& data, const std::string& named) const {
    const Value& value = graph_.value(id);
    const std::optional<std::vector<int64_t>>& known = shapes_.known[index_of(id)];
    const bool fits = value.kind == ValueKind::constant
                          ? data.data() == value.constant.data() || data.equals(value.constant)
                          : data.dtype() == value.dtype &&
                                data.dims() == shapes_.dims[index_of(id)] &&
                                (!known || data.to_int64s() == *known);
    require(fits, named + "from a constant that is another one");
  }

  void write(const Range& range, ValueId value, const std::string& where) {
    require(range.kind != Kind::constant, where + "writes to a constant");
    if (range.kind == Kind::output) {
      require(is_gradient(range.index) == in_backward(), where + "writes to the other phase's");
      require(plan_.updated_input[range.index] < 0, where + "writes beside what it updates");
    }
    if (range.kind == Kind::input) {
      const std::optional<size_t> output = updated_by_[range.index];
      require(value >= 0 && output && root_[index_of(graph_.outputs()[*output].value)] == value &&
                  range.end - range.begin == plan_.inputs[range.index].bytes(),
              where + "writes to an input that it does not update");
    }
    if (range.kind != Kind::absent) {
      owners_of(range).write(range.begin, range.end, {value, range.begin});
    }
  }

  StepBytes follow_step(const PlanStep& step) {
    const size_t num_args = size_t{step.num_inputs} + step.num_outputs + 1;
    require(step.first_arg <= plan_.args.size() && num_args <= plan_.args.size() - step.first_arg,
            "a step has no addresses");
    const Location* const args = plan_.args.data() + step.first_arg;
    if (step.node == kNoNode) {
      require(step.num_inputs == 1 && step.num_outputs == 1, "a copy has other operands than one");
      return follow_copy(args);
    }
    const Node& node = graph_.node(step.node);
    const std::string where = Graph::context(node);
    require(step.num_inputs == node.inputs.size() && step.num_outputs == node.outputs.size(),
            where + "has another number of operands or results");
    StepBytes bytes{.inputs = {}, .outputs = {}, .workspace = step.workspace_bytes};
    std::vector<Range> operands, written;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      bytes.inputs.push_back(bytes_of_value(node.inputs[i]));
      const Range range = range_of(args[i], bytes.inputs.back(), where, false);
      if (node.inputs[i] != kNoValue) read(range, node.inputs[i], where);
      operands.push_back(range);
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const Location& location = args[node.inputs.size() + i];
      bytes.outputs.push_back(bytes_of_value(node.outputs[i]));
      require((location.kind == Kind::absent) == (node.outputs[i] == kNoValue),
              where + "has a result without a place, or a place without a result");
      written.push_back(range_of(location, bytes.outputs.back(), where, true));
    }
    const Location& workspace = args[node.inputs.size() + node.outputs.size()];
    if (workspace.kind == Kind::absent) {
      require(bytes.workspace == 0, where + "has no place for its workspace");
    } else {
      require(workspace.kind == Kind::arena, where + "has its workspace in a tensor");
      written.push_back(range_of(workspace, bytes.workspace, where, true));
    }
    for (size_t i = 0; i < written.size(); ++i) {
      for (size_t j = 0; j < operands.size(); ++j) {
        if (!written[i].overlaps(operands[j])) continue;
        const std::pair<int, int> pair{static_cast<int>(j), static_cast<int>(i)};
        require(std::ranges::find(step.inplace, pair) != step.inplace.end() &&
                    written[i].begin == operands[j].begin && written[i].end == operands[j].end,
                where + "writes over an operand that its kernel reads");
      }
      for (size_t j = 0; j < i; ++j) {
        require(!written[i].overlaps(written[j]), where + "writes over its own results");
      }
    }
    for (size_t i = 0; i < written.size(); ++i) {
      write(written[i], i < node.outputs.size() ? node.outputs[i] : Owner::kWorkspace, where);
    }
    return bytes;
  }

  StepBytes follow_copy(const Location* args) {
    const Location& to = args[1];
    std::optional<size_t> output;
    if (to.kind == Kind::output) output = to.index;
    if (to.kind == Kind::input) output = updated_by_.at(to.index);
    require(output && *output < blocks_.size(), "a copy goes elsewhere than into an output");
    const size_t bytes = plan_.outputs[*output].bytes();
    const ValueId value = graph_.outputs()[*output].value;
    const Range from = range_of(args[0], bytes, "a copy ", false);
    read(from, value, "a copy ");
    const Range range = range_of(to, bytes, "a copy ", true);
    require(!range.overlaps(from), "a copy lies over what it copies");
    if (to.kind == Kind::output) {
      require(is_gradient(*output) == in_backward(), "a copy goes to the other phase's block");
    }
    // The output shows a part of its root perhaps: what lies here is the output's own value.
    copied_[*output] = true;
    owners_of(range).write(range.begin, range.end, {value, 0});
    return {{bytes}, {bytes}, 0};
  }

  // At the end of a phase its outputs hold their values, and nothing else.
  void check_outputs(bool of_backward) {
    for (size_t k = 0; k < blocks_.size(); ++k) {
      if (is_gradient(k) != of_backward) continue;
      const ValueId value = graph_.outputs()[k].value;
      const int input = plan_.updated_input[k];
      const Owners& owners = input >= 0 ? inputs_[static_cast<size_t>(input)] : blocks_[k];
      const Owner expected = copied_[k] ? Owner{value, 0} : Owner{root_[index_of(value)], 0};
      require((copied_[k] || offset_[index_of(value)] == 0) &&
                  owners.all(0, plan_.outputs[k].bytes(), expected),
              str("output '", graph_.outputs()[k].name, "' is not there at the end"));
    }
  }

  // Who is given an output once it is final may write to it, and to what it is the gradient of.
  void check_handed_over() const {
    require(plan_.output_steps.size() == blocks_.size(), "not all outputs have their steps");
    std::map<std::string_view, uint32_t> input_of;
    for (size_t i = 0; i < graph_.inputs().size(); ++i) {
      input_of[graph_.value(graph_.inputs()[i].value).name] = static_cast<uint32_t>(i);
    }
    std::vector<std::vector<size_t>> gradients_of(inputs_.size());
    for (size_t k = 0; k < blocks_.size(); ++k) {
      const auto input = input_of.find(graph_.outputs()[k].target);
      if (is_gradient(k) && input != input_of.end()) gradients_of[input->second].push_back(k);
    }
    for (size_t s = 0; s < plan_.steps.size(); ++s) {
      const PlanStep& step = plan_.steps[s];
      for (uint32_t a = 0; a < step.num_inputs + step.num_outputs; ++a) {
        const Location& at = plan_.args[step.first_arg + a];
        if (at.kind == Kind::output) {
          const StepRange& range = plan_.output_steps[at.index];
          require(
              range.begin <= s && s < range.end,
              str("output '", graph_.outputs()[at.index].name, "' is touched behind its steps"));
        }
        if (at.kind != Kind::input) continue;
        for (const size_t k : gradients_of[at.index]) {
          require(s < plan_.output_steps[k].end,
                  str("output '", graph_.outputs()[k].name,
                      "' is given out before what it is the gradient of was last read"));
        }
      }
    }
  }

  // Copies of inputs lie behind the arena, beside each other.
  void check_staging() const {
    std::vector<std::pair<size_t, size_t>> placed;
    for (size_t i = 0; i < plan_.staged_inputs.size(); ++i) {
      const size_t begin = plan_.staged_inputs[i];
      if (begin == ExecutionPlan::kNotStaged) continue;
      const size_t bytes = plan_.inputs.at(i).bytes();
      if (bytes == 0) continue;
      require(begin >= plan_.arena_bytes && bytes <= plan_.staging_bytes &&
                  begin - plan_.arena_bytes <= plan_.staging_bytes - bytes,
              "the copy of an input lies elsewhere than behind the arena");
      placed.emplace_back(begin, begin + bytes);
    }
    std::ranges::sort(placed);
    for (size_t i = 1; i < placed.size(); ++i) {
      require(placed[i - 1].second <= placed[i].first, "copies of inputs lie over each other");
    }
  }

  const Graph& graph_;
  const ExecutionPlan& plan_;
  const ResolvedShapes shapes_;
  std::vector<ValueId> root_;   // by value: whose bytes it shows
  std::vector<size_t> offset_;  // by value: from where on
  std::vector<bool> made_by_step_;
  Owners arena_;
  std::vector<Owners> inputs_;
  std::vector<Owners> blocks_;
  std::vector<bool> copied_;                       // by output
  std::vector<std::optional<size_t>> updated_by_;  // by input: the output that it becomes
  std::map<ValueId, uint32_t> constant_of_;
  std::map<uint32_t, ValueId> value_of_;
  size_t step_ = 0;
};

}  // namespace

std::vector<StepBytes> verify_plan(const Graph& graph, const std::vector<Dims>& input_dims,
                                   const ExecutionPlan& plan) {
  return Follower(graph, input_dims, plan).follow();
}

}  // namespace ortrain
