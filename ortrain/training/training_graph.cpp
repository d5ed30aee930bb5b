// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/training_graph.h"

#include <algorithm>
#include <map>
#include <set>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/training/lamb_slices.h"
#include "ortrain/training/prepare_model.h"

namespace ortrain {
namespace {

// Gradients from this size on are used up as they come, where no norm of all is needed.
constexpr int64_t kLargeParameter = 16384;

size_t index_of(ValueId id) { return static_cast<size_t>(id); }

int64_t known_elements(const Shape& shape) {
  int64_t count = 1;
  for (const Dim& extent : shape) {
    if (!extent.is_constant()) return kLargeParameter;
    count *= extent.constant();
  }
  return count;
}

int64_t element_count(const Value& value) {
  int64_t count = 1;
  for (const Dim& extent : value.shape) {
    if (!extent.is_constant()) {
      throw InvalidModelError(
          str("parameter '", value.name, "' has the open shape ", shape_str(value.shape)));
    }
    count *= extent.constant();
  }
  return count;
}

// The type in which gradients add up and moments are kept.
DType wide_type(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

size_t find_loss(const Graph& graph, const std::string& name) {
  std::string names;
  for (size_t i = 0; i < graph.outputs().size(); ++i) {
    const GraphOutput& output = graph.outputs()[i];
    if (output.role != OutputRole::user) continue;
    if (output.name == name) {
      const Value& value = graph.value(output.value);
      if (!is_float(value.dtype) ||
          !std::ranges::all_of(value.shape, [](const Dim& extent) { return extent.is(1); })) {
        throw InvalidModelError(str("the loss '", name, "' is ", name_of(value.dtype),
                                    shape_str(value.shape), ", expected a single float"));
      }
      return i;
    }
    names += (names.empty() ? "" : ", ") + output.name;
  }
  throw InvalidModelError(str("there is no output '", name, "' to be the loss; there are ", names));
}

bool needs_norm(const TrainingOptions& options) {
  return options.optimizer.max_norm > 0 || options.scales_loss;
}

struct Parameter {
  std::string target;
  ValueId value = kNoValue;
  ValueId gradient = kNoValue;
};

class TrainingGraphMaker {
 public:
  TrainingGraphMaker(const Graph& model, const TrainingOptions& options, bool fused = true,
                     Processor processor = Processor::cpu)
      : graph_(model), options_(options), fused_(fused), processor_(processor), builder_(graph_) {
    builder_.set_phase(Phase::backward);
    if (options.accumulation < 1) {
      throw InvalidModelError(
          str("accumulation is ", options.accumulation, ", expected 1 or more"));
    }
  }

  Graph make(StepKind kind) {
    differentiate();
    if (kind == StepKind::next || kind == StepKind::last) add_to_kept();
    if (kind == StepKind::first || kind == StepKind::next) {
      keep_gradients(kind == StepKind::first);
      finish();
      keep_gradients_as_they_come(graph_);
      return std::move(graph_);
    }
    update();
    finish();
    if (updates_as_gradients_come(options_, kind)) update_as_gradients_come(graph_);
    return std::move(graph_);
  }

  Graph make_optimizer() {
    differentiate();
    Graph alone;
    alone.name = graph_.name;
    const Graph whole = std::move(graph_);
    graph_ = std::move(alone);
    if (options_.owned) {
      take_owned(whole);
    } else {
      for (Parameter& parameter : parameters_) {
        const Value& value = whole.value(parameter.value);
        parameter.value = add_parameter(parameter.target, value, value.shape);
        parameter.gradient = kept_gradient(parameter);
      }
    }
    update();
    finish();
    return std::move(graph_);
  }

  std::vector<std::string> trained() {
    differentiate();
    std::vector<std::string> result;
    for (const Parameter& parameter : parameters_) result.push_back(parameter.target);
    return result;
  }

 private:
  bool needs_norm() const { return ortrain::needs_norm(options_); }

  void differentiate() {
    const size_t loss = find_loss(graph_, options_.loss);
    const ValueId loss_value = graph_.outputs()[loss].value;
    const DType dtype = graph_.value(loss_value).dtype;
    ValueId seed = builder_.scalar(dtype, 1.0 / static_cast<double>(options_.accumulation));
    if (options_.scales_loss) {
      seed = builder_.mul(builder_.cast(scalar_state(kLossScale, DType::f64), dtype), seed);
    }
    if (!graph_.value(loss_value).shape.empty()) {
      seed = builder_.expand_like(seed, loss_value);
    }
    declare_written_buffers();
    // Arguments may have gradients in a program; here only parameters are trained.
    for (GraphInput& input : graph_.inputs()) {
      if (input.role != InputRole::parameter) input.requires_grad = false;
    }
    build_backward(graph_, {.output_indices = {loss}, .gradients = {seed}});
    std::map<std::string, ValueId> gradients;
    for (const GraphOutput& output : graph_.outputs()) {
      if (output.role == OutputRole::gradient) gradients[output.target] = output.value;
    }
    std::erase_if(graph_.outputs(),
                  [](const GraphOutput& output) { return output.role == OutputRole::gradient; });
    for (const GraphInput& input : graph_.inputs()) {
      const auto found = gradients.find(graph_.value(input.value).name);
      if (found == gradients.end()) continue;
      parameters_.push_back({input.target, input.value, found->second});
    }
    if (parameters_.empty()) {
      throw InvalidModelError(
          str("the loss '", options_.loss, "' depends on no parameter that is to be trained"));
    }
  }

  // A buffer that the model only writes to is no input of it, and has to be one to be written.
  void declare_written_buffers() {
    std::set<std::string> known;
    for (const GraphInput& input : graph_.inputs()) known.insert(input.target);
    const std::vector<GraphOutput> outputs = graph_.outputs();
    for (const GraphOutput& output : outputs) {
      if (output.role != OutputRole::buffer_update || !known.insert(output.target).second) continue;
      const Value value = graph_.value(output.value);
      graph_.add_input({.role = InputRole::buffer, .target = output.target},
                       output.target + ".written", value.dtype, value.shape);
    }
  }

  ValueId add_parameter(const std::string& target, const Value& value, const Shape& shape) {
    return graph_.add_input({.role = InputRole::parameter, .target = target}, value.name,
                            value.dtype, shape);
  }

  // Puts the slices that are owned in place of the parameters; the norm stays that of all.
  void take_owned(const Graph& whole) {
    std::map<std::string, const Value*> trained;
    for (const Parameter& parameter : parameters_) {
      const Value& value = whole.value(parameter.value);
      trained[parameter.target] = &value;
      if (!needs_norm()) continue;
      const std::string target = state_target(parameter.target, kAccumulatedGradient);
      norm_of_.push_back(graph_.add_input({.role = InputRole::state, .target = target}, target,
                                          wide_type(value.dtype), value.shape));
    }
    parameters_.clear();
    std::set<std::string> seen;
    for (const ParameterSlice& slice : *options_.owned) {
      const auto found = trained.find(slice.parameter);
      if (found == trained.end()) continue;  // another graph trains it
      const Value& value = *found->second;
      if (!seen.insert(slice.parameter).second) {
        throw InvalidModelError(str("two slices of '", slice.parameter, "' are owned"));
      }
      const int64_t size = element_count(value);
      if (slice.begin < 0 || slice.begin >= slice.end || slice.end > size) {
        throw InvalidModelError(str("elements ", slice.begin, " to ", slice.end, " of '",
                                    slice.parameter, "' are owned, it has ", size));
      }
      Parameter owned{.target = slice.parameter};
      owned.value = add_parameter(slice.parameter, value, {Dim(slice.end - slice.begin)});
      owned.gradient = state(owned, kOwnedGradient);
      parameters_.push_back(owned);
    }
  }

  ValueId scalar_state(const std::string& target, DType dtype) {
    for (const GraphInput& input : graph_.inputs()) {
      if (input.role == InputRole::state && input.target == target) return input.value;
    }
    return graph_.add_input({.role = InputRole::state, .target = target}, target, dtype, {});
  }

  ValueId state(const Parameter& parameter, const std::string& name) {
    const Value value = graph_.value(parameter.value);
    const std::string target = state_target(parameter.target, name);
    return graph_.add_input({.role = InputRole::state, .target = target}, target,
                            wide_type(value.dtype), value.shape);
  }

  ValueId kept_gradient(const Parameter& parameter) {
    return state(parameter, kAccumulatedGradient);
  }

  void add_update(ValueId value, const std::string& target) {
    graph_.add_output({.value = value,
                       .name = target + ".update",
                       .role = OutputRole::state_update,
                       .target = target});
  }

  ValueId wide(const Parameter& parameter) {
    return builder_.cast(parameter.gradient, wide_type(graph_.value(parameter.value).dtype));
  }

  void add_to_kept() {
    for (Parameter& parameter : parameters_) {
      parameter.gradient = builder_.add(kept_gradient(parameter), wide(parameter));
    }
  }

  void keep_gradients(bool declare) {
    for (Parameter& parameter : parameters_) {
      if (declare) kept_gradient(parameter);
      add_update(wide(parameter), state_target(parameter.target, kAccumulatedGradient));
    }
  }

  // --- the optimizer

  struct Group {
    Attributes attributes;
    double rate_factor = 1.0;
    std::vector<Parameter> parameters;
    size_t step_class = 0;
  };

  // In the order of the options, what stands in no group last; those of one have one step number.
  std::vector<Group> groups() const {
    std::vector<Group> result;
    for (const Group& group : groups_of_options()) {
      std::map<size_t, Group> by_class;
      for (const Parameter& parameter : group.parameters) {
        const auto found = options_.step_classes.find(parameter.target);
        const size_t step_class = found == options_.step_classes.end() ? 0 : found->second;
        Group& made = by_class[step_class];
        made.attributes = group.attributes;
        made.rate_factor = group.rate_factor;
        made.step_class = step_class;
        made.parameters.push_back(parameter);
      }
      for (auto& [step_class, made] : by_class) result.push_back(std::move(made));
    }
    return result;
  }

  std::vector<Group> groups_of_options() const {
    std::map<std::string, size_t> group_of;
    std::vector<Group> result;
    for (const ParameterGroup& group : options_.optimizer.groups) {
      Group made{.attributes = options_.optimizer.attributes, .rate_factor = group.rate_factor};
      for (const auto& [name, value] : group.attributes) made.attributes[name] = value;
      for (const std::string& name : group.parameters) {
        if (!all_parameters_.contains(name)) {
          throw InvalidModelError(str("a group has '", name, "', which is no parameter"));
        }
        if (!group_of.emplace(name, result.size()).second) {
          throw InvalidModelError(str("parameter '", name, "' stands in groups twice"));
        }
      }
      result.push_back(std::move(made));
    }
    result.push_back({.attributes = options_.optimizer.attributes});
    for (const Parameter& parameter : parameters_) {
      const auto found = group_of.find(parameter.target);
      result[found == group_of.end() ? result.size() - 1 : found->second].parameters.push_back(
          parameter);
    }
    return result;
  }

  void update() {
    ValueId factor = kNoValue, skip = kNoValue;
    if (needs_norm()) {
      std::vector<ValueId> gradients = norm_of_;
      if (gradients.empty()) {
        for (const Parameter& parameter : parameters_) gradients.push_back(parameter.gradient);
      }
      const ValueId norm = builder_.own("GradientNorm", gradients);
      std::vector<ValueId> inputs{norm};
      if (options_.scales_loss) inputs.push_back(scalar_state(kLossScale, DType::f64));
      const std::vector<ValueId> made =
          builder_.node(kOrtrainDomain, "ClipFactor", inputs,
                        {{"max_norm", options_.optimizer.max_norm}}, {true, true, true});
      factor = made[0];
      scalar_state(kGradientNorm, DType::f64);
      scalar_state(kAllFinite, DType::boolean);
      add_update(made[1], kGradientNorm);
      add_update(made[2], kAllFinite);
      if (options_.scales_loss) skip = builder_.op("Not", {made[2]});
    }
    const ValueId rate = scalar_state(kLearningRate, DType::f64);
    if (options_.owned && options_.optimizer.step == "LambStep") {
      update_lamb_slices(rate, factor, skip);
      return;
    }
    for (const Group& group : groups()) {
      const ValueId group_rate = rate_of(group, rate);
      const ValueId step = step_of(group);
      std::vector<Parameter> small;
      for (const Parameter& parameter : group.parameters) {
        if (needs_norm() || known_elements(builder_.shape(parameter.value)) < kLargeParameter) {
          small.push_back(parameter);
        } else {
          add_step(group, {parameter}, {group_rate, step, factor, skip});
        }
      }
      if (!small.empty()) add_step(group, small, {group_rate, step, factor, skip});
    }
  }

  ValueId rate_of(const Group& group, ValueId rate) {
    return group.rate_factor == 1.0 ? rate : builder_.mul(rate, group.rate_factor);
  }

  ValueId step_of(const Group& group) {
    return scalar_state(step_number_target(group.step_class), DType::i64);
  }

  void update_lamb_slices(ValueId rate, ValueId factor, ValueId skip) {
    if (options_.sum_norms.empty()) {
      throw InvalidModelError("slices that LambStep updates need the function sum_norms");
    }
    if (parameters_.empty()) return;
    const std::vector<std::string> names = optimizer_states(options_.optimizer.step, {});
    std::vector<LambSliceGroup> made;
    std::vector<std::string> targets;
    for (const Group& group : groups()) {
      LambSliceGroup& slices = made.emplace_back();
      slices.attributes = group.attributes;
      slices.rate = rate_of(group, rate);
      slices.step = step_of(group);
      for (const Parameter& parameter : group.parameters) {
        const auto place =
            std::ranges::find(*options_.owned, parameter.target, &ParameterSlice::parameter);
        slices.slices.push_back({.number = place - options_.owned->begin(),
                                 .parameter = parameter.value,
                                 .gradient = parameter.gradient,
                                 .exp_avg = state(parameter, names[0]),
                                 .exp_avg_sq = state(parameter, names[1])});
        targets.push_back(parameter.target);
      }
    }
    builder_.set_layer("optimizer");
    add_lamb_steps(builder_, made, factor, skip, options_.sum_norms);
    builder_.set_layer("");
    auto target = targets.begin();
    for (const LambSliceGroup& group : made) {
      for (const LambSlice& slice : group.slices) {
        add_update(slice.parameter, *target);
        add_update(slice.exp_avg, state_target(*target, names[0]));
        add_update(slice.exp_avg_sq, state_target(*target, names[1]));
        ++target;
      }
    }
  }

  void add_step(const Group& group, const std::vector<Parameter>& parameters,
                std::vector<ValueId> inputs) {
    const std::vector<std::string> states =
        optimizer_states(options_.optimizer.step, group.attributes);
    for (const Parameter& parameter : parameters) inputs.push_back(parameter.value);
    for (const Parameter& parameter : parameters) inputs.push_back(parameter.gradient);
    for (const std::string& name : states) {
      for (const Parameter& parameter : parameters) inputs.push_back(state(parameter, name));
    }
    builder_.set_layer(parameters.size() == 1 ? "optimizer/" + parameters[0].target : "optimizer");
    const std::vector<ValueId> made =
        builder_.node(kOrtrainDomain, options_.optimizer.step, inputs, group.attributes,
                      std::vector<bool>(parameters.size() * (1 + states.size()), true));
    builder_.set_layer("");
    size_t next = 0;
    for (const Parameter& parameter : parameters) add_update(made[next++], parameter.target);
    for (const std::string& name : states) {
      for (const Parameter& parameter : parameters) {
        add_update(made[next++], state_target(parameter.target, name));
      }
    }
  }

  void finish() {
    std::ranges::stable_partition(graph_.outputs(), [](const GraphOutput& output) {
      return output.role == OutputRole::user;
    });
    graph_.remove_dead_nodes();
    graph_.sort();
    if (fused_) run_pipeline(graph_, "fuse", StagePart::whole, processor_);
    copy_what_moves_on();
    verify(graph_);
  }

  // Where one tensor becomes what another one was, which changes as well (a line of the latest
  // values), a plan could not tell which to write first: a value of its own goes between them.
  void copy_what_moves_on() {
    std::map<ValueId, std::string> targets;
    for (const GraphInput& input : graph_.inputs()) targets[input.value] = input.target;
    std::set<std::string> written;
    const std::vector<GraphOutput> outputs = graph_.outputs();
    for (const GraphOutput& output : outputs) {
      if (output.role != OutputRole::user) written.insert(output.target);
    }
    for (size_t k = 0; k < outputs.size(); ++k) {
      const auto source = targets.find(outputs[k].value);
      if (outputs[k].role != OutputRole::buffer_update || source == targets.end()) continue;
      if (source->second == outputs[k].target || !written.contains(source->second)) continue;
      const Shape shape = builder_.shape(outputs[k].value);
      ValueId value = outputs[k].value;
      if (shape.empty()) value = builder_.op("Reshape", {value, builder_.int64s({1})});
      value = builder_.op("Concat", {value}, {{"axis", int64_t{0}}});
      if (shape.empty()) value = builder_.op("Reshape", {value, builder_.int64s({})});
      graph_.outputs()[k].value = value;
    }
    graph_.sort();
  }

  Graph graph_;
  const TrainingOptions& options_;
  const bool fused_;
  const Processor processor_;
  GraphBuilder builder_;
  std::set<std::string> all_parameters_ = names_of_parameters();
  std::vector<Parameter> parameters_;
  std::vector<ValueId> norm_of_;  // the gradients, where they are others than those of parameters_

  std::set<std::string> names_of_parameters() const {
    std::set<std::string> names;
    for (const GraphInput& input : graph_.inputs()) {
      if (input.role == InputRole::parameter) names.insert(input.target);
    }
    return names;
  }
};

}  // namespace

Graph make_training_graph(const Graph& model, const TrainingOptions& options, StepKind kind,
                          bool fused, Processor processor) {
  return TrainingGraphMaker(model, options, fused, processor).make(kind);
}

bool updates_as_gradients_come(const TrainingOptions& options, StepKind kind) {
  return (kind == StepKind::whole || kind == StepKind::last) && !needs_norm(options);
}

namespace {

// Puts nodes behind the last one that makes what they read or, with `after_readers`, reads it as
// well; those of them that go to one place keep their order.
void move_up(Graph& graph, const std::set<NodeId>& moved, bool after_readers) {
  std::vector<NodeId> others;
  std::vector<size_t> last_use(graph.num_values(), 0);  // behind how many of the others
  const auto see = [&](const std::vector<ValueId>& values, size_t place) {
    for (ValueId value : values) {
      if (value == kNoValue) continue;
      last_use[index_of(value)] = std::max(last_use[index_of(value)], place);
    }
  };
  if (after_readers) {
    size_t place = 0;
    for (NodeId id : graph.order()) {
      if (!moved.contains(id)) see(graph.node(id).inputs, ++place);
    }
  }
  std::multimap<size_t, NodeId> after;
  for (NodeId id : graph.order()) {
    if (!moved.contains(id)) {
      others.push_back(id);
      see(graph.node(id).outputs, others.size());
      continue;
    }
    size_t place = 0;
    for (ValueId value : graph.node(id).inputs) {
      if (value != kNoValue) place = std::max(place, last_use[index_of(value)]);
    }
    after.emplace(place, id);
    see(graph.node(id).outputs, place);  // another of them may read it
  }
  std::vector<NodeId> order;
  for (size_t i = 0; i <= others.size(); ++i) {
    if (i > 0) order.push_back(others[i - 1]);
    const auto [begin, end] = after.equal_range(i);
    for (auto it = begin; it != end; ++it) order.push_back(it->second);
  }
  graph.reorder(std::move(order));
}

}  // namespace

void update_as_gradients_come(Graph& graph) {
  std::set<std::string_view> parameters;
  for (const GraphInput& input : graph.inputs()) {
    if (input.role == InputRole::parameter) parameters.insert(input.target);
  }
  std::set<NodeId> steps;
  for (const GraphOutput& output : graph.outputs()) {
    const NodeId producer = graph.value(output.value).producer;
    if (output.role != OutputRole::state_update || producer == kNoNode) continue;
    if (parameters.contains(output.target)) steps.insert(producer);
  }
  // Views show a parameter under other names; the planner finds what reads them too late.
  move_up(graph, steps, /*after_readers=*/true);
}

void keep_gradients_as_they_come(Graph& graph) {
  const std::vector<std::vector<NodeId>> users = graph.users();
  std::set<NodeId> sums;
  for (const GraphOutput& output : graph.outputs()) {
    const NodeId producer = graph.value(output.value).producer;
    if (output.role != OutputRole::state_update || producer == kNoNode) continue;
    // Products, whose operands others read too, stay among these.
    const std::vector<ValueId>& inputs = graph.node(producer).inputs;
    const bool ends_here = std::ranges::all_of(inputs, [&](ValueId value) {
      return value == kNoValue || std::ranges::all_of(users[index_of(value)], [&](NodeId user) {
               return user == producer;
             });
    });
    if (ends_here) sums.insert(producer);
  }
  move_up(graph, sums, /*after_readers=*/false);
}

Graph make_optimizer_graph(const Graph& model, const TrainingOptions& options, bool fused) {
  return TrainingGraphMaker(model, options, fused).make_optimizer();
}

Graph make_evaluation_graph(const Graph& model) {
  Graph graph = model;
  drop_updates(graph);
  for (GraphInput& input : graph.inputs()) input.requires_grad = false;
  graph.sort();
  run_pipeline(graph, "fuse");
  verify(graph);
  return graph;
}

std::vector<std::string> trained_parameters(const Graph& model, const TrainingOptions& options) {
  return TrainingGraphMaker(model, options).trained();
}

}  // namespace ortrain
