// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/session.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "ortrain/base/error.h"
#include "ortrain/runtime/backward_parts.h"
#include "ortrain/training/memory_budget.h"
#include "python/src/device.h"
#include "python/src/init.h"
#include "python/src/memory_sample.h"
#include "python/src/plan_sizes.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

std::string describe(const Graph& graph, const GraphInput& input) {
  const char* kind = "input";
  if (input.role == InputRole::parameter) kind = "parameter";
  if (input.role == InputRole::buffer) kind = "buffer";
  if (input.role == InputRole::gradient) kind = "gradient of output";
  const std::string& name = input.role == InputRole::user || input.target.empty()
                                ? graph.value(input.value).name
                                : input.target;
  return str(kind, " '", name, "'");
}

// A session and where the tensors of its runs are.
struct DeviceSession {
  std::shared_ptr<Session> session;
  std::string device;
  dlpack::Device place;
};

// One forward in flight, with the tensors it reads. Refuses a call from another thread, or from an
// external function, while a call runs without the interpreter's lock.
class Run {
 public:
  explicit Run(std::shared_ptr<DeviceSession> session)
      : session_(session->session), place_(session->place) {}

  // `tensors`: one per graph input whose role is not `gradient`, in order.
  nb::list forward(nb::list tensors) {
    const InUse in_use(*this);
    const Graph& graph = session_->graph();
    const std::vector<GraphInput>& inputs = graph.inputs();
    std::vector<Dims> dims(inputs.size());
    std::vector<const void*> addresses(inputs.size(), nullptr);
    kept_.clear();
    kept_.reserve(inputs.size());
    addresses_.clear();
    samples_.clear();
    size_t next = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].role == InputRole::gradient) continue;
      if (next >= tensors.size()) throw InternalError("too few tensors for the graph's inputs");
      BorrowedTensor tensor = borrow_input(inputs[i], tensors[next++]);
      samples_.push_back(sample(tensor));
      dims[i] = std::move(tensor.dims);
      addresses[i] = tensor.data;
      addresses_.push_back(tensor.data);
      kept_.push_back(std::move(tensor.keep_alive));
    }
    std::vector<RunOutput> outputs;
    void* const stream = current_stream(place_);
    {
      nb::gil_scoped_release release;
      std::shared_ptr<const ExecutionPlan> plan = session_->plan(dims, &planned_);
      context_.emplace(session_, std::move(plan));
      outputs = context_->forward(addresses, stream);
    }
    return to_list(outputs);
  }

  // `tensors`: one per graph input with role `gradient`, in order.
  nb::list backward(nb::list tensors) {
    begin_backward(std::move(tensors));
    const InUse in_use(*this);
    std::vector<RunOutput> outputs;
    {
      nb::gil_scoped_release release;
      outputs = context_->continue_backward(context_->plan().steps.size());
    }
    kept_.clear();
    kept_gradients_.clear();
    return to_list(outputs);
  }

  void begin_backward(nb::list tensors) {
    const InUse in_use(*this);
    if (!context_) throw InternalError("backward needs a forward first");
    const Graph& graph = session_->graph();
    const std::vector<GraphInput>& inputs = graph.inputs();
    std::vector<const void*> addresses(inputs.size(), nullptr);
    kept_gradients_.clear();
    size_t next = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].role != InputRole::gradient) continue;
      if (next >= tensors.size()) throw InternalError("too few gradients for the graph's outputs");
      BorrowedTensor tensor = borrow_input(inputs[i], tensors[next++]);
      if (tensor.dims != context_->plan().inputs[i].dims) {
        throw ShapeError(str("the ", describe(graph, inputs[i]), " has shape ",
                             dims_str(tensor.dims), ", expected ",
                             dims_str(context_->plan().inputs[i].dims)));
      }
      addresses[i] = tensor.data;
      kept_gradients_.push_back(std::move(tensor.keep_alive));
    }
    follow_inputs();
    void* const stream = current_stream(place_);
    nb::gil_scoped_release release;
    context_->begin_backward(addresses, stream);
  }

  // Returns (position among the gradients, tensor) of those that are final since the last call.
  nb::list continue_backward(size_t end) {
    const InUse in_use(*this);
    if (!context_) throw InternalError("continue_backward needs begin_backward first");
    follow_inputs();
    std::vector<RunOutput> outputs;
    {
      nb::gil_scoped_release release;
      outputs = context_->continue_backward(end);
    }
    if (!context_->in_backward()) {
      kept_.clear();
      kept_gradients_.clear();
    }
    nb::list result;
    size_t position = 0;
    for (size_t k = 0; k < outputs.size(); ++k) {
      if (session_->graph().outputs()[k].role != OutputRole::gradient) continue;
      if (outputs[k].block) result.append(nb::make_tuple(position, to_torch(outputs[k], place_)));
      ++position;
    }
    return result;
  }

  // Parts of the backward that each make `bytes` of gradients or more: (step behind the last one,
  // positions among the gradients).
  nb::list backward_parts(size_t bytes) const {
    if (!context_) throw InternalError("the parts of a backward are known after a forward");
    nb::list result;
    for (const BackwardPart& part :
         ortrain::backward_parts(session_->graph(), context_->plan(), bytes)) {
      nb::list positions;
      for (size_t position : part.gradients) positions.append(position);
      result.append(nb::make_tuple(part.end, positions));
    }
    return result;
  }

  // What of the caller's memory the backward reads: (position, behind the last step) of inputs,
  // those with role `gradient` aside, and of user outputs.
  nb::tuple backward_reads() const {
    if (!context_) throw InternalError("what a backward reads is known after a forward");
    const Graph& graph = session_->graph();
    const BackwardReads reads = ortrain::backward_reads(graph, context_->plan());
    nb::list inputs;
    for (const auto& [index, end] : reads.inputs) {
      const auto before = graph.inputs().begin() + static_cast<std::ptrdiff_t>(index);
      const auto position = std::count_if(graph.inputs().begin(), before, [](const GraphInput& i) {
        return i.role != InputRole::gradient;
      });
      inputs.append(nb::make_tuple(position, end));
    }
    nb::list outputs;
    for (const auto& [index, end] : reads.outputs) {
      if (graph.outputs()[index].role != OutputRole::user) continue;
      const auto before = graph.outputs().begin() + static_cast<std::ptrdiff_t>(index);
      const auto position =
          std::count_if(graph.outputs().begin(), before,
                        [](const GraphOutput& o) { return o.role == OutputRole::user; });
      outputs.append(nb::make_tuple(position, end));
    }
    return nb::make_tuple(inputs, outputs);
  }

  // `position`: among the inputs, those with role `gradient` aside.
  void replace_input(size_t position, nb::handle tensor) {
    const InUse in_use(*this);
    if (!context_) throw InternalError("inputs are replaced after a forward");
    const std::vector<GraphInput>& inputs = session_->graph().inputs();
    size_t next = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].role == InputRole::gradient || next++ != position) continue;
      BorrowedTensor borrowed = borrow_input(inputs[i], tensor);
      if (borrowed.dims != context_->plan().inputs[i].dims) {
        throw ShapeError(str("the ", describe(session_->graph(), inputs[i]), " has shape ",
                             dims_str(borrowed.dims), ", expected ",
                             dims_str(context_->plan().inputs[i].dims)));
      }
      context_->replace_input(i, borrowed.data);
      addresses_[position] = borrowed.data;
      kept_[position] = std::move(borrowed.keep_alive);
      return;
    }
    throw InternalError(str("the graph has no input ", position));
  }

  // Positions of the inputs that seem to hold other elements than at the forward, those with role
  // `gradient` aside. `tensors`: as of the forward. On the CPU alone; elsewhere none.
  nb::list changed_inputs(nb::list tensors) const {  // also while a backward runs in another thread
    nb::list changed;
    size_t next = 0;
    for (const GraphInput& input : session_->graph().inputs()) {
      if (input.role == InputRole::gradient) continue;
      if (next >= tensors.size() || next >= samples_.size()) break;
      if (sample(borrow_input(input, tensors[next])) != samples_[next]) changed.append(next);
      ++next;
    }
    return changed;
  }

  bool can_run_backward() const { return context_ && context_->can_run_backward(); }
  bool in_backward() const { return context_ && context_->in_backward(); }
  uint64_t plan_id() const { return context_ ? context_->plan().id : 0; }
  bool planned() const { return planned_; }

  // The graph whose nodes the plan runs, where that is another than the session's.
  std::shared_ptr<Graph> rewritten() const {
    if (!context_ || !context_->plan().rewritten) return nullptr;
    return std::make_shared<Graph>(*context_->plan().rewritten);
  }

  nb::dict memory_plan() const { return context_ ? plan_sizes(context_->plan()) : nb::dict(); }

 private:
  // A storage that has been resized lies elsewhere, or nowhere: `storage.resize_(0)` and back, as
  // sharded trainers and offloading do between forward and backward. PyTorch's backward reads what
  // is there then.
  void follow_inputs() {
    const std::vector<GraphInput>& inputs = session_->graph().inputs();
    std::optional<BackwardReads> reads;
    size_t next = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].role == InputRole::gradient || next >= kept_.size()) continue;
      const size_t position = next++;
      const TensorView view = view_anywhere(kept_[position], "an input");
      if (view.data == addresses_[position]) continue;
      if (!reads) reads = ortrain::backward_reads(session_->graph(), context_->plan());
      const size_t next_step = context_->next_step();
      const bool is_read = std::ranges::any_of(reads->inputs, [&](const CallersMemory& memory) {
        return memory.index == i && memory.end > next_step;
      });
      if (!is_read) continue;
      require_memory(view.data, view.dims, view.rank, describe(session_->graph(), inputs[i]));
      context_->replace_input(i, view.data);
      addresses_[position] = view.data;
    }
  }

  // Made and dropped with the interpreter's lock held.
  class InUse {
   public:
    explicit InUse(Run& run) : run_(run) {
      if (run_.in_use_) throw InternalError("a run is asked for something while it runs");
      run_.in_use_ = true;
    }
    ~InUse() { run_.in_use_ = false; }
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;

   private:
    Run& run_;
  };

  uint64_t sample(const BorrowedTensor& tensor) const {
    if (place_.type != dlpack::kCpu) return 0;
    size_t bytes = size_of(tensor.dtype);
    for (const int64_t extent : tensor.dims)
      bytes *= static_cast<size_t>(extent);  // memory that is there
    return sample_of(tensor.data, bytes);
  }

  BorrowedTensor borrow_input(const GraphInput& input, nb::handle tensor) const {
    const Graph& graph = session_->graph();
    BorrowedTensor result = borrow(tensor, describe(graph, input), place_);
    const DType expected = graph.value(input.value).dtype;
    if (result.dtype != expected) {
      throw DTypeError(str(describe(graph, input), " is ", name_of(result.dtype), ", expected ",
                           name_of(expected)));
    }
    return result;
  }

  nb::list to_list(const std::vector<RunOutput>& outputs) const {
    nb::list result;
    for (const RunOutput& output : outputs) {
      if (output.block) result.append(to_torch(output, place_));
    }
    return result;
  }

  std::shared_ptr<Session> session_;
  dlpack::Device place_;
  std::optional<RunContext> context_;
  std::vector<nb::object> kept_;        // inputs, those with role `gradient` aside
  std::vector<const void*> addresses_;  // where they lie
  std::vector<uint64_t> samples_;       // of the inputs, at the forward
  std::vector<nb::object> kept_gradients_;
  bool planned_ = false;
  bool in_use_ = false;
};

nb::dict to_dict(const SessionProfile::Snapshot& snapshot) {
  nb::list steps;
  for (const ProfiledStep& step : snapshot.steps) {
    nb::dict row;
    row["op"] = step.op;
    row["layer"] = step.layer;
    row["kernel"] = step.kernel;
    row["phase"] = step.phase == Phase::forward ? "forward" : "backward";
    row["bytes"] = step.bytes;
    row["flops"] = step.flops;
    row["runs"] = step.runs;
    row["seconds"] = static_cast<double>(step.nanoseconds) * 1e-9;
    steps.append(row);
  }
  nb::list events;
  for (const ProfiledEvent& event : snapshot.events) {
    events.append(nb::make_tuple(event.step, event.thread, event.start, event.duration));
  }
  nb::dict result;
  result["graph"] = snapshot.graph;
  result["steps"] = steps;
  result["events"] = events;
  return result;
}

}  // namespace

void init_session(nb::module_& module) {
  nb::class_<DeviceSession>(module, "Session")
      .def(
          "__init__",
          [](DeviceSession* self, const Graph& graph, size_t max_plan_bytes,
             const std::string& device, const Graph* unfused, uint64_t max_bytes,
             double max_share) {
            const NamedDevice found = find_device(device);
            Session::Options options{.max_plan_bytes = max_plan_bytes};
            const MemoryBudget budget{.bytes = max_bytes, .share = max_share};
            if (budget.is_set()) {
              options.make_plan = plan_within(unfused != nullptr ? *unfused : graph, budget);
            }
            auto session = std::make_shared<Session>(graph, *found.kernels, std::move(options));
            new (self) DeviceSession{std::move(session), found.name, found.place};
          },
          nb::arg("graph"), nb::arg("max_plan_bytes") = Session::Options().max_plan_bytes,
          nb::arg("device") = "cpu", nb::arg("unfused").none() = nb::none(),
          nb::arg("max_bytes") = 0, nb::arg("max_share") = 0.0,
          "With a budget, in bytes or as a share, `unfused` is the graph before stage \"fuse\".")
      .def_prop_ro("device", [](const DeviceSession& self) { return self.device; })
      // A thread that plans holds the session, and may wait for the interpreter's lock to log.
      .def_prop_ro("num_plans",
                   [](const DeviceSession& self) {
                     nb::gil_scoped_release release;
                     return self.session->num_plans();
                   })
      // How many stretches of steps were launched from a recording, recorded, and run directly.
      .def_prop_ro("recordings",
                   [](const DeviceSession& self) {
                     const StepRecordings::Counts counts = [&] {
                       nb::gil_scoped_release release;
                       return self.session->recordings().counts();
                     }();
                     nb::dict result;
                     result["launched"] = counts.launched;
                     result["recorded"] = counts.recorded;
                     result["direct"] = counts.direct;
                     return result;
                   })
      .def(
          "plan",
          [](DeviceSession& self, const std::vector<Dims>& dims) {
            Session& session = *self.session;
            std::shared_ptr<const ExecutionPlan> plan;
            {
              nb::gil_scoped_release release;
              plan = session.plan(dims);
            }
            nb::dict result = plan_sizes(*plan);
            nb::list steps;
            const Graph& graph = plan->graph_of(session.graph());
            for (const PlanStep& step : plan->steps) {
              const std::string op = step.node == kNoNode ? "copy" : graph.node(step.node).op;
              const std::string layer = step.node == kNoNode ? "" : graph.node(step.node).name;
              steps.append(nb::make_tuple(op, step.kernel, layer));
            }
            result["steps"] = steps;
            return result;
          },
          nb::arg("input_dims"))
      // The plan used last with its steps and buffers; None before the first.
      .def("latest_plan",
           [](const DeviceSession& self) -> nb::object {
             std::shared_ptr<const ExecutionPlan> plan;
             {
               nb::gil_scoped_release release;
               plan = self.session->latest_plan();
             }
             return plan ? nb::object(describe_plan(self.session->graph(), *plan)) : nb::none();
           })
      .def("profile",
           [](const DeviceSession& self) { return to_dict(self.session->profile().snapshot()); })
      .def("clear_profile", [](const DeviceSession& self) { self.session->profile().clear(); });

  nb::class_<Run>(module, "Run")
      .def(nb::init<std::shared_ptr<DeviceSession>>())
      .def("forward", &Run::forward)
      .def("backward", &Run::backward)
      .def("begin_backward", &Run::begin_backward)
      .def("continue_backward", &Run::continue_backward, nb::arg("end"))
      .def("backward_parts", &Run::backward_parts, nb::arg("bytes"))
      .def_prop_ro("backward_reads", &Run::backward_reads)
      .def("replace_input", &Run::replace_input, nb::arg("position"), nb::arg("tensor"))
      .def("changed_inputs", &Run::changed_inputs, nb::arg("tensors"))
      .def_prop_ro("can_run_backward", &Run::can_run_backward)
      .def_prop_ro("in_backward", &Run::in_backward)
      .def_prop_ro("plan_id", &Run::plan_id)
      .def_prop_ro("planned", &Run::planned)
      .def_prop_ro("rewritten", &Run::rewritten)
      .def_prop_ro("memory_plan", &Run::memory_plan);

  module.def("profiling", &profiling);
  module.def("set_profiling", &set_profiling, nb::arg("on"));
  module.def("clear_profiles", &clear_profiles);
  module.def("profiles", [] {
    nb::list result;
    for (const SessionProfile::Snapshot& snapshot : all_profiles()) {
      result.append(to_dict(snapshot));
    }
    return result;
  });
  module.def("memory_stats", [] {
    const BlockPool::Stats stats = BlockPool::host()->stats();
    nb::dict result;
    result["bytes_in_use"] = stats.bytes_in_use;
    result["bytes_cached"] = stats.bytes_cached;
    result["system_allocations"] = stats.system_allocations;
    return result;
  });
  module.def("trim_memory", [] { BlockPool::host()->trim(); });
}

}  // namespace ortrain::python
