// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/execution_plan.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <optional>

#include "ortrain/base/flags.h"
#include "ortrain/base/log.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/roles.h"
#include "ortrain/plan/memory_planner.h"
#include "ortrain/plan/resolve_shapes.h"
#include "ortrain/runtime/node_cost.h"
#include "ortrain/runtime/node_limits.h"
#include "ortrain/runtime/plan_verifier.h"
#include "ortrain/runtime/planned_constants.h"

namespace ortrain {
namespace {

// Results up to this size are computed while planning when nothing but constants goes in.
constexpr size_t kFoldBytes = size_t{16} << 20;
// Larger inputs are not copied for the sake of a recording.
constexpr size_t kMostStagedBytes = size_t{32} << 20;
// An output up to this size that the backward reads is given out as a copy, which its taker may
// change before.
constexpr size_t kGivenAsCopyBytes = size_t{64} << 10;

size_t index_of(ValueId id) { return static_cast<size_t>(id); }

uint64_t machine_memory() {
  static const uint64_t bytes = [] {
    const long pages = ::sysconf(_SC_PHYS_PAGES), size = ::sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(size)
                                 : static_cast<uint64_t>(kMostBytes);
  }();
  return bytes;
}

class PlanMaker {
 public:
  PlanMaker(const Graph& graph, const std::vector<Dims>& input_dims, const KernelRegistry& kernels,
            const PlanOptions& options)
      : graph_(graph),
        kernels_(kernels),
        options_(options),
        shapes_(resolve_shapes(graph, input_dims)),
        constants_(graph) {}

  std::shared_ptr<const ExecutionPlan> make() {
    static std::atomic<uint64_t> next_id{0};
    plan_.id = next_id++;
    plan_.sizes_only = options_.sizes_only;
    const PlanningForSizes scope(options_.sizes_only);
    for (const GraphInput& input : graph_.inputs()) plan_.inputs.push_back(spec_of(input.value));
    for (const GraphOutput& output : graph_.outputs()) {
      plan_.outputs.push_back(spec_of(output.value));
    }
    find_updated_inputs();
    choose_kernels_and_fold();
    drop_unneeded();
    check_sizes();
    number_steps();
    assign_buffers();
    assign_outputs();
    place_and_emit();
    take_constants();
    plan_.placed = place_constants(kernels_.device(), plan_.constants);
    if (plan_.placed.block) plan_.constant_bytes = plan_.placed.block->bytes();
    number_for_faults();
    prepare_recording();
    log_summary();
    return std::make_shared<const ExecutionPlan>(std::move(plan_));
  }

 private:
  // A node that runs, or is a view.
  struct Work {
    NodeId node = kNoNode;
    const Kernel* kernel = nullptr;
    std::optional<NodeSpec> spec;
    std::optional<std::vector<int64_t>> view_offsets;
    bool needed = false;
    int step = -1;
  };
  struct Buffer {
    size_t bytes = 0;
    int first = 0;
    int last = 0;
    int output = -1;  // the graph output whose block it is
    int input = -1;   // the graph input whose memory it takes; neither: in the arena
    bool has_output_value = false;
  };
  // Where a value's bytes come from: a buffer, or an input or constant.
  struct Source {
    int buffer = -1;
    Location location;  // when buffer < 0
    size_t offset = 0;
  };
  // `late`: into the memory of an input, after all others.
  struct Copy {
    size_t output;
    bool backward;
    bool late;
  };

  static constexpr size_t kTwice = static_cast<size_t>(-1);

  bool is_backward(const Node& node) const {
    return has_backward_ && node.phase == Phase::backward;
  }

  TensorSpec spec_of(ValueId id) const {
    if (id == kNoValue) return {};
    return {graph_.value(id).dtype, shapes_.dims[index_of(id)]};
  }

  void find_updated_inputs() {
    plan_.updated_input.assign(graph_.outputs().size(), -1);
    for (const GraphInput& input : graph_.inputs()) {
      has_backward_ = has_backward_ || input.role == InputRole::gradient;
    }
    if (!options_.updates_in_place) return;
    std::map<std::string_view, int> kept;
    for (size_t i = 0; i < graph_.inputs().size(); ++i) {
      const GraphInput& input = graph_.inputs()[i];
      if (is_kept(input.role)) kept[input.target] = static_cast<int>(i);
    }
    for (size_t k = 0; k < graph_.outputs().size(); ++k) {
      const GraphOutput& output = graph_.outputs()[k];
      if (output.role != OutputRole::state_update && output.role != OutputRole::buffer_update) {
        continue;
      }
      const auto found = kept.find(output.target);
      if (found == kept.end()) {
        throw InvalidModelError(str("output '", output.name, "' updates '", output.target,
                                    "', which is no parameter, buffer or state of the graph"));
      }
      const size_t input = static_cast<size_t>(found->second);
      if (plan_.outputs[k] != plan_.inputs[input]) {
        throw ShapeError(str("output '", output.name, "' is ", tensor_spec_str(plan_.outputs[k]),
                             ", '", output.target, "', which it updates, ",
                             tensor_spec_str(plan_.inputs[input])));
      }
      plan_.updated_input[k] = found->second;
      if (!update_of_.emplace(output.value, k).second) {
        // One value for two inputs: both are copies of it.
        update_of_[output.value] = kTwice;
      }
    }
  }

  // Kernels read what their arguments name, and nothing else of the constants.
  void take_constants() {
    std::vector<bool> is_read(constants_.size(), false);
    for (const Location& location : plan_.args) {
      if (location.kind == Location::Kind::constant) is_read[location.index] = true;
    }
    constants_.keep(is_read);
    plan_.constant_bytes = constants_.result_bytes();
    plan_.constants = constants_.take();
  }

  NodeSpec node_spec(const OpDef& def, const Node& node) const {
    std::vector<TensorSpec> inputs;
    std::vector<TensorSpec> outputs;
    std::vector<const void*> constants;
    for (ValueId id : node.inputs) {
      inputs.push_back(spec_of(id));
      constants.push_back(id == kNoValue ? nullptr : constants_.data(id));
    }
    for (ValueId id : node.outputs) outputs.push_back(spec_of(id));
    return NodeSpec(def, node, std::move(inputs), std::move(outputs), std::move(constants));
  }

  // Outputs that follow from the shapes alone need no kernel.
  bool fold_known(const Node& node) {
    for (ValueId id : node.outputs) {
      if (id != kNoValue && !shapes_.known[index_of(id)]) return false;
    }
    for (ValueId id : node.outputs) {
      if (id == kNoValue) continue;
      constants_.add_result(
          id, TensorData::from_ints(graph_.value(id).dtype, shapes_.dims[index_of(id)],
                                    *shapes_.known[index_of(id)]));
    }
    constants_.computed(node);
    return true;
  }

  void choose_kernels_and_fold() {
    for (NodeId id : graph_.order()) {
      const Node& node = graph_.node(id);
      if (fold_known(node)) continue;
      bool constant = true;
      for (ValueId input : node.inputs) {
        if (input != kNoValue && !constants_.has(input)) constant = false;
      }
      const OpDef& def = op_registry().get(node.domain, node.op);
      Work work;
      work.node = id;
      work.spec = node_spec(def, node);
      // What depends on constants alone is computed on the host.
      if (constant && !def.draws_random_numbers && may_fold(*work.spec)) {
        choose_kernel(work, cpu_kernels());
        if (evaluate(work)) continue;
        work.spec = node_spec(def, node);
      }
      choose_kernel(work, kernels_);
      work_.push_back(std::move(work));
    }
  }

  bool may_fold(const NodeSpec& spec) const {
    const ByteCount bytes = bytes_of_outputs(spec);
    return bytes <= bytes_of<char>(kFoldBytes) && constants_.have_room(bytes);
  }

  // Whatever shapes were inferred: a view shows nothing beside the bytes of its input.
  static void check_views(const NodeSpec& spec, const std::vector<int64_t>& offsets) {
    const size_t shown = spec.input(0).bytes();
    for (size_t i = 0; i < spec.num_outputs(); ++i) {
      if (!spec.has_output(i)) continue;
      const size_t bytes = spec.output(i).bytes();
      if (bytes > shown || static_cast<uint64_t>(offsets[i]) > shown - bytes) {
        throw ShapeError(str(spec.context(), "its result ", tensor_spec_str(spec.output(i)),
                             " does not lie in its input ", tensor_spec_str(spec.input(0))));
      }
    }
  }

  static void choose_kernel(Work& work, const KernelRegistry& kernels) {
    std::vector<std::string> refused;
    work.kernel = kernels.select(*work.spec, &refused);
    if (work.kernel == nullptr) throw UnsupportedError(no_kernel_message(*work.spec, refused));
    if (log_enabled("dispatch")) {
      std::string line = str(work.spec->context(), work.kernel->name);
      for (const std::string& reason : refused) line += "; refused " + reason;
      log_line("dispatch", line);
    }
    work.view_offsets.reset();
    if (work.kernel->view) work.view_offsets = work.kernel->view(*work.spec);
    if (work.view_offsets) check_views(*work.spec, *work.view_offsets);
  }

  static std::string no_kernel_message(const NodeSpec& spec,
                                       const std::vector<std::string>& refused) {
    std::string message = spec.context() + "no kernel takes (";
    for (size_t i = 0; i < spec.num_inputs(); ++i) {
      message += i ? ", " : "";
      message += spec.has_input(i) ? tensor_spec_str(spec.input(i)) : "absent";
    }
    message += ")";
    for (const std::string& reason : refused) message += "; " + reason;
    return message;
  }

  // False where the kernel wants more memory than a result may have, or might take long: it is left
  // to the runs.
  bool evaluate(Work& work) {
    if (has_long_empty_axes(*work.spec)) return false;
    const Node& node = graph_.node(work.node);
    KernelFn run;
    if (!work.view_offsets) {
      run = with_context(work.spec->context(), [&] { return work.kernel->make(*work.spec); });
      if (work.spec->workspace_bytes() > bytes_of<char>(kFoldBytes)) return false;
    }
    std::vector<const void*> in;
    std::vector<void*> out;
    std::vector<TensorData> results;
    for (ValueId id : node.inputs) in.push_back(id == kNoValue ? nullptr : constants_.data(id));
    for (ValueId id : node.outputs) {
      void* data = nullptr;
      results.push_back(id == kNoValue ? TensorData()
                                       : TensorData::allocate(graph_.value(id).dtype,
                                                              shapes_.dims[index_of(id)], &data));
      out.push_back(data);
    }
    if (work.view_offsets) {
      for (size_t i = 0; i < out.size(); ++i) {
        if (out[i] == nullptr || results[i].bytes() == 0) continue;
        std::memcpy(out[i], static_cast<const char*>(in[0]) + (*work.view_offsets)[i],
                    results[i].bytes());
      }
    } else {
      void* workspace_data = nullptr;
      const TensorData workspace = TensorData::allocate(
          DType::u8, {static_cast<int64_t>(work.spec->workspace_bytes().value())}, &workspace_data);
      run({in.data(), out.data(), workspace_data});
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] == kNoValue) continue;
      constants_.add_result(node.outputs[i], std::move(results[i]));
    }
    constants_.computed(node);
    return true;
  }

  // What runs outside of the engine may do more than give results.
  static bool is_left_out(const Work& work) {
    return !work.kernel->waits && has_nothing_to_do(*work.spec);
  }

  // Folding can leave nodes that only fed folded ones.
  void drop_unneeded() {
    std::vector<bool> needed(graph_.num_values(), false);
    for (const GraphOutput& output : graph_.outputs()) needed[index_of(output.value)] = true;
    for (auto work = work_.rbegin(); work != work_.rend(); ++work) {
      const Node& node = graph_.node(work->node);
      work->needed = std::any_of(node.outputs.begin(), node.outputs.end(), [&](ValueId id) {
        return id != kNoValue && needed[index_of(id)];
      });
      if (!work->needed) continue;
      for (ValueId id : node.inputs) {
        if (id != kNoValue) needed[index_of(id)] = true;
      }
    }
    std::erase_if(work_, [](const Work& work) { return !work.needed; });
  }

  // Of nodes that cannot run kernels are not made.
  void check_sizes() const {
    const uint64_t limit = options_.memory_limit > 0     ? options_.memory_limit
                           : kernels_.device().is_host() ? machine_memory()
                                                         : static_cast<uint64_t>(kMostBytes);
    for (const Work& work : work_) {
      if (work.view_offsets) continue;
      check_memory(*work.spec, limit);
      if (!work.kernel->waits && !has_nothing_to_do(*work.spec)) check_empty_axes(*work.spec);
    }
  }

  // Steps get numbers; one more number at the end of each phase stands for copies into outputs.
  void number_steps() {
    int next = 0;
    bool backward = false;
    for (Work& work : work_) {
      if (!backward && is_backward(graph_.node(work.node))) {
        backward = true;
        forward_end_ = next++;
      }
      if (!work.view_offsets) work.step = next++;
    }
    if (!backward) forward_end_ = next++;
    backward_end_ = next;

    // The value whose bytes a view shows, and the last step that reads it.
    root_.resize(graph_.num_values());
    for (size_t id = 0; id < root_.size(); ++id) root_[id] = static_cast<ValueId>(id);
    last_read_.assign(graph_.num_values(), -1);
    is_output_.assign(graph_.num_values(), false);
    for (const Work& work : work_) {
      const Node& node = graph_.node(work.node);
      if (work.view_offsets) {
        plan_.views.push_back({work.node, *work.view_offsets});
        for (ValueId id : node.outputs) {
          if (id != kNoValue) root_[index_of(id)] = root_[index_of(node.inputs[0])];
        }
        continue;
      }
      for (ValueId id : node.inputs) {
        if (id == kNoValue) continue;
        int& last = last_read_[index_of(root_[index_of(id)])];
        last = std::max(last, work.step);
      }
    }
    for (const GraphOutput& output : graph_.outputs()) {
      is_output_[index_of(root_[index_of(output.value)])] = true;
    }
    refuse_exchanged_inputs();
    find_shown_updates();
  }

  // What an input becomes may be another value's bytes seen in another shape, such as a sum behind
  // a Reshape: that one goes into the input's memory.
  void find_shown_updates() {
    for (size_t k = 0; k < graph_.outputs().size(); ++k) {
      const ValueId value = graph_.outputs()[k].value, root = root_[index_of(value)];
      if (plan_.updated_input[k] < 0 || root == value) continue;
      if (spec_of(root).bytes() != spec_of(value).bytes()) continue;
      const auto [found, is_first] = update_of_.emplace(root, k);
      if (!is_first) found->second = kTwice;
    }
  }

  // Copies at the end would read what others of them have written.
  void refuse_exchanged_inputs() const {
    std::map<ValueId, size_t> updates;
    for (size_t k = 0; k < graph_.outputs().size(); ++k) {
      const int input = plan_.updated_input[k];
      if (input >= 0) updates[graph_.inputs()[static_cast<size_t>(input)].value] = k;
    }
    for (size_t k = 0; k < graph_.outputs().size(); ++k) {
      if (plan_.updated_input[k] < 0) continue;
      const auto other = updates.find(root_[index_of(graph_.outputs()[k].value)]);
      if (other != updates.end() && other->second != k) {
        throw UnsupportedError(str("'", graph_.outputs()[k].target, "' becomes what '",
                                   graph_.outputs()[other->second].target,
                                   "' was, which changes as well"));
      }
    }
  }

  static std::vector<std::pair<int, int>> inplace_pairs(const Work& work) {
    return work.kernel->inplace_of ? work.kernel->inplace_of(*work.spec) : work.kernel->inplace;
  }

  // The graph input into whose memory output `i` of a node can go at once, or -1.
  int input_to_overwrite(const Work& work, size_t i) const {
    const Node& node = graph_.node(work.node);
    const auto update = update_of_.find(node.outputs[i]);
    if (update == update_of_.end() || update->second == kTwice) return -1;
    const int input = plan_.updated_input[update->second];
    const ValueId target = graph_.inputs()[static_cast<size_t>(input)].value;
    // What views it shows at the end is read then.
    if (is_output_[index_of(target)]) return -1;
    const int last = last_read_[index_of(target)];
    if (last < work.step) return input;
    if (last > work.step) return -1;
    const std::vector<std::pair<int, int>> pairs = inplace_pairs(work);
    for (size_t j = 0; j < node.inputs.size(); ++j) {
      if (node.inputs[j] == kNoValue || root_[index_of(node.inputs[j])] != target) continue;
      const std::pair<int, int> pair{static_cast<int>(j), static_cast<int>(i)};
      if (node.inputs[j] != target || std::ranges::find(pairs, pair) == pairs.end()) return -1;
    }
    return input;
  }

  void assign_buffers() {
    sources_.resize(graph_.num_values());
    for (size_t i = 0; i < graph_.inputs().size(); ++i) {
      sources_[index_of(graph_.inputs()[i].value)].location = {Location::Kind::input,
                                                               static_cast<uint32_t>(i), 0};
    }
    for (size_t i = 0; i < sources_.size(); ++i) {
      const int index = constants_.index(static_cast<ValueId>(i));
      if (index < 0) continue;
      sources_[i].location = {Location::Kind::constant, static_cast<uint32_t>(index), 0};
    }
    for (const Work& work : work_) {
      const Node& node = graph_.node(work.node);
      if (work.view_offsets) {
        for (size_t i = 0; i < node.outputs.size(); ++i) {
          if (node.outputs[i] == kNoValue) continue;
          Source& view = sources_[index_of(node.outputs[i])];
          view = source_of(node.inputs[0]);
          view.offset += static_cast<size_t>((*work.view_offsets)[i]);
        }
        continue;
      }
      for (size_t i = 0; i < node.outputs.size(); ++i) {
        if (node.outputs[i] == kNoValue) continue;
        const int overwritten = input_to_overwrite(work, i);
        const int shared = overwritten >= 0 ? -1 : inplace_buffer(work, i);
        Source& source = sources_[index_of(node.outputs[i])];
        if (shared >= 0) {
          source.buffer = shared;
        } else {
          source.buffer = static_cast<int>(buffers_.size());
          buffers_.push_back({.bytes = spec_of(node.outputs[i]).bytes(),
                              .first = work.step,
                              .input = overwritten});
        }
        Buffer& buffer = buffers_[static_cast<size_t>(source.buffer)];
        buffer.last = std::max(work.step, last_read_[index_of(node.outputs[i])]);
        buffer.has_output_value = is_output_[index_of(node.outputs[i])];
      }
    }
  }

  Source source_of(ValueId id) {
    if (constants_.has(id) && sources_[index_of(id)].location.kind == Location::Kind::absent) {
      sources_[index_of(id)].location = {Location::Kind::constant,
                                         static_cast<uint32_t>(constants_.index(id)), 0};
    }
    return sources_[index_of(id)];
  }

  // The buffer of an input that dies at this step and may be overwritten with output `i`, or -1.
  int inplace_buffer(const Work& work, size_t i) {
    const Node& node = graph_.node(work.node);
    const ValueId output = node.outputs[i];
    for (const std::pair<int, int>& pair : inplace_pairs(work)) {
      const int from = pair.first, to = pair.second;
      if (static_cast<size_t>(to) != i || static_cast<size_t>(from) >= node.inputs.size()) continue;
      const ValueId input = node.inputs[static_cast<size_t>(from)];
      if (input == kNoValue) continue;
      const Source source = source_of(input);
      if (source.buffer < 0 || source.offset != 0) continue;
      const Buffer& buffer = buffers_[static_cast<size_t>(source.buffer)];
      if (buffer.has_output_value || buffer.last != work.step) continue;
      if (spec_of(input).bytes() != buffer.bytes || spec_of(output).bytes() != buffer.bytes) {
        continue;
      }
      // An output block is made when its phase starts.
      if (is_output_[index_of(output)] &&
          (buffer.first < forward_end_) != (work.step < forward_end_)) {
        continue;
      }
      const bool read_elsewhere = [&] {
        for (size_t j = 0; j < node.inputs.size(); ++j) {
          if (static_cast<int>(j) == from || node.inputs[j] == kNoValue) continue;
          if (source_of(node.inputs[j]).buffer == source.buffer) return true;
        }
        for (size_t k = 0; k < i; ++k) {
          if (node.outputs[k] != kNoValue &&
              sources_[index_of(node.outputs[k])].buffer == source.buffer) {
            return true;
          }
        }
        return false;
      }();
      if (!read_elsewhere) return source.buffer;
    }
    return -1;
  }

  bool is_read_in_backward(ValueId id) const {
    return has_backward_ && last_read_[index_of(root_[index_of(id)])] > forward_end_;
  }

  // Gives each graph output a block of its own: the buffer itself where possible, else a copy.
  void assign_outputs() {
    for (size_t k = 0; k < graph_.outputs().size(); ++k) {
      const GraphOutput& output = graph_.outputs()[k];
      const bool backward = output.role == OutputRole::gradient;
      const Source source = source_of(output.value);
      if (source.buffer >= 0) {
        Buffer& buffer = buffers_[static_cast<size_t>(source.buffer)];
        const bool same_phase = (buffer.first > forward_end_) == backward;
        if (plan_.updated_input[k] >= 0 && buffer.input == plan_.updated_input[k]) continue;
        if (plan_.updated_input[k] < 0 && source.offset == 0 && buffer.output < 0 &&
            buffer.input < 0 && same_phase && spec_of(output.value).bytes() == buffer.bytes &&
            !(output.role == OutputRole::user && is_read_in_backward(output.value) &&
              buffer.bytes <= kGivenAsCopyBytes)) {
          buffer.output = static_cast<int>(k);
          continue;
        }
        buffer.last = std::max(buffer.last, backward ? backward_end_ : forward_end_);
      } else if (source.location.kind == Location::Kind::input && source.offset == 0 &&
                 static_cast<int>(source.location.index) == plan_.updated_input[k]) {
        continue;  // it stays what it is
      }
      copies_.push_back({k, backward, plan_.updated_input[k] >= 0});
    }
    std::ranges::stable_partition(copies_, [](const Copy& copy) { return !copy.late; });
    ByteCount forward, gradients;
    for (size_t k = 0; k < graph_.outputs().size(); ++k) {
      if (plan_.updated_input[k] >= 0) continue;
      const bool backward = graph_.outputs()[k].role == OutputRole::gradient;
      (backward ? gradients : forward) += bytes_of<char>(plan_.outputs[k].bytes());
    }
    plan_.forward_output_bytes = forward.value();
    plan_.gradient_bytes = gradients.value();
  }

  Location location_of(ValueId id) {
    const Source source = source_of(id);
    if (source.buffer < 0) {
      Location location = source.location;
      check(location.kind != Location::Kind::absent, "a value is read that nobody makes");
      location.offset += source.offset;
      return location;
    }
    const Buffer& buffer = buffers_[static_cast<size_t>(source.buffer)];
    if (buffer.input >= 0) {
      return {Location::Kind::input, static_cast<uint32_t>(buffer.input), source.offset};
    }
    if (buffer.output >= 0) {
      return {Location::Kind::output, static_cast<uint32_t>(buffer.output), source.offset};
    }
    return {Location::Kind::arena, 0,
            arena_offset_[static_cast<size_t>(source.buffer)] + source.offset};
  }

  void place_and_emit() {
    struct Made {
      KernelFn run;
      int workspace = -1;  // index of its lifetime
    };
    std::vector<BufferLifetime> lifetimes;
    std::vector<int> lifetime_of(buffers_.size(), -1);
    for (size_t b = 0; b < buffers_.size(); ++b) {
      if (buffers_[b].output >= 0 || buffers_[b].input >= 0) continue;
      lifetime_of[b] = static_cast<int>(lifetimes.size());
      lifetimes.push_back({bytes_of<char>(buffers_[b].bytes), buffers_[b].first, buffers_[b].last});
    }
    std::vector<Made> made(work_.size());
    for (size_t w = 0; w < work_.size(); ++w) {
      Work& work = work_[w];
      if (work.view_offsets) continue;
      if (is_left_out(work)) {
        made[w].run = [](const KernelArgs&) {};
        continue;
      }
      made[w].run =
          with_context(work.spec->context(), [&] { return work.kernel->make(*work.spec); });
      if (work.spec->workspace_bytes() > ByteCount()) {
        made[w].workspace = static_cast<int>(lifetimes.size());
        lifetimes.push_back({work.spec->workspace_bytes(), work.step, work.step});
      }
    }
    const MemoryLayout layout = plan_memory(lifetimes);
    plan_.arena_bytes = layout.total_bytes;
    plan_.arena_lower_bound = layout.lower_bound;
    arena_offset_.assign(buffers_.size(), 0);
    for (size_t b = 0; b < buffers_.size(); ++b) {
      if (lifetime_of[b] >= 0) {
        arena_offset_[b] = layout.offsets[static_cast<size_t>(lifetime_of[b])];
      }
    }

    bool backward = false;
    for (size_t w = 0; w < work_.size(); ++w) {
      const Work& work = work_[w];
      if (work.view_offsets) continue;
      const Node& node = graph_.node(work.node);
      if (!backward && is_backward(node)) {
        backward = true;
        emit_copies(false);
        plan_.num_forward_steps = plan_.steps.size();
      }
      PlanStep step{.node = work.node,
                    .kernel = work.kernel->name,
                    .run = std::move(made[w].run),
                    .first_arg = static_cast<uint32_t>(plan_.args.size()),
                    .num_inputs = static_cast<uint32_t>(node.inputs.size()),
                    .num_outputs = static_cast<uint32_t>(node.outputs.size()),
                    .inplace = inplace_pairs(work),
                    .workspace_bytes = work.spec->workspace_bytes().value(),
                    .kept_bytes = work.spec->kept_bytes()};
      for (size_t k = 0; k < node.outputs.size(); ++k) {
        step.outputs.push_back(work.spec->has_output(k) ? work.spec->output(k) : TensorSpec{});
      }
      const NodeCost cost = node_cost(*work.spec);
      step.bytes = cost.bytes;
      step.flops = cost.flops;
      for (ValueId id : node.inputs) {
        plan_.args.push_back(id == kNoValue ? Location{} : location_of(id));
      }
      for (ValueId id : node.outputs) {
        plan_.args.push_back(id == kNoValue ? Location{} : location_of(id));
      }
      plan_.args.push_back(made[w].workspace < 0
                               ? Location{}
                               : Location{Location::Kind::arena, 0,
                                          layout.offsets[static_cast<size_t>(made[w].workspace)]});
      plan_.steps.push_back(std::move(step));
    }
    if (!backward) {
      emit_copies(false);
      plan_.num_forward_steps = plan_.steps.size();
    }
    emit_copies(true);
    find_output_steps();
  }

  void find_output_steps() {
    plan_.output_steps.assign(graph_.outputs().size(), {});
    std::vector<size_t> input_ends(graph_.inputs().size(), 0);
    for (size_t s = 0; s < plan_.steps.size(); ++s) {
      const size_t begin = plan_.steps[s].first_arg;
      const size_t end =
          s + 1 < plan_.steps.size() ? plan_.steps[s + 1].first_arg : plan_.args.size();
      for (size_t a = begin; a < end; ++a) {
        if (plan_.args[a].kind == Location::Kind::input) input_ends[plan_.args[a].index] = s + 1;
        if (plan_.args[a].kind != Location::Kind::output) continue;
        StepRange& range = plan_.output_steps[plan_.args[a].index];
        if (range.end == 0) range.begin = s;
        range.end = s + 1;
      }
    }
    // Who takes a gradient may change what it is the gradient of at once.
    std::map<std::string_view, size_t> input_of;
    for (size_t i = 0; i < graph_.inputs().size(); ++i) {
      input_of[graph_.value(graph_.inputs()[i].value).name] = i;
    }
    for (size_t k = 0; k < graph_.outputs().size(); ++k) {
      const GraphOutput& output = graph_.outputs()[k];
      const auto found = input_of.find(output.target);
      if (output.role != OutputRole::gradient || found == input_of.end()) continue;
      plan_.output_steps[k].end = std::max(plan_.output_steps[k].end, input_ends[found->second]);
    }
  }

  void emit_copies(bool backward) {
    for (const Copy& copy : copies_) {
      if (copy.backward != backward) continue;
      const size_t bytes = plan_.outputs[copy.output].bytes();
      PlanStep step{.kernel = "copy",
                    .run =
                        [bytes, device = &kernels_.device()](const KernelArgs& args) {
                          device->copy(args.out[0], args.in[0], bytes, args.stream);
                        },
                    .first_arg = static_cast<uint32_t>(plan_.args.size()),
                    .num_inputs = 1,
                    .num_outputs = 1,
                    .bytes = 2 * static_cast<double>(bytes)};
      plan_.args.push_back(location_of(graph_.outputs()[copy.output].value));
      const int input = plan_.updated_input[copy.output];
      plan_.args.push_back(
          input >= 0 ? Location{Location::Kind::input, static_cast<uint32_t>(input), 0}
                     : Location{Location::Kind::output, static_cast<uint32_t>(copy.output), 0});
      plan_.args.push_back({});
      plan_.steps.push_back(std::move(step));
    }
  }

  void prepare_recording() {
    plan_.can_be_recorded =
        kernels_.device().records() &&
        std::ranges::none_of(work_, [](const Work& work) { return work.kernel->waits; });
    plan_.staged_inputs.assign(graph_.inputs().size(), ExecutionPlan::kNotStaged);
    if (!plan_.can_be_recorded) return;
    const auto aligned = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
    for (size_t i = 0; i < graph_.inputs().size(); ++i) {
      const size_t bytes = plan_.inputs[i].bytes();
      if (is_kept(graph_.inputs()[i].role) || bytes > kMostStagedBytes) continue;
      plan_.staged_inputs[i] = aligned(plan_.arena_bytes) + plan_.staging_bytes;
      plan_.staging_bytes += aligned(bytes);
    }
    if (plan_.staging_bytes > 0) {
      plan_.staging_bytes += aligned(plan_.arena_bytes) - plan_.arena_bytes;
    }
  }

  void number_for_faults() {
    if (kernels_.device().is_host() || options_.sizes_only) return;
    std::vector<std::string> contexts;
    for (const PlanStep& step : plan_.steps) {
      contexts.push_back(step.node == kNoNode ? std::string()
                                              : Graph::context(graph_.node(step.node)));
    }
    plan_.step_numbers = std::make_shared<StepNumbers>(std::move(contexts));
  }

  void log_summary() const {
    if (!log_enabled("plan")) return;
    log_line("plan",
             str(plan_.steps.size(), " steps (", plan_.num_forward_steps, " forward), arena ",
                 plan_.arena_bytes, " bytes, lower bound ", plan_.arena_lower_bound, ", constants ",
                 plan_.constant_bytes, ", outputs ", plan_.forward_output_bytes, ", gradients ",
                 plan_.gradient_bytes));
  }

  const Graph& graph_;
  const KernelRegistry& kernels_;
  const PlanOptions options_;
  ResolvedShapes shapes_;
  ExecutionPlan plan_;
  PlannedConstants constants_;
  bool has_backward_ = false;
  std::map<ValueId, size_t> update_of_;  // which output updates an input with this value
  std::vector<Work> work_;
  int forward_end_ = 0;
  int backward_end_ = 0;
  std::vector<ValueId> root_;
  std::vector<int> last_read_;   // by root value
  std::vector<bool> is_output_;  // by root value
  std::vector<Source> sources_;
  std::vector<Buffer> buffers_;
  std::vector<size_t> arena_offset_;  // by buffer
  std::vector<Copy> copies_;
};

}  // namespace

std::shared_ptr<const ExecutionPlan> make_execution_plan(const Graph& graph,
                                                         const std::vector<Dims>& input_dims,
                                                         const KernelRegistry& kernels,
                                                         const PlanOptions& options) {
  std::shared_ptr<const ExecutionPlan> plan = PlanMaker(graph, input_dims, kernels, options).make();
  if (flag_is_on("ORTRAIN_VERIFY")) verify_plan(graph, input_dims, *plan);
  return plan;
}

}  // namespace ortrain
