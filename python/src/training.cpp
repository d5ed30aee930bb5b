// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <set>

#include "ortrain/base/error.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/training/artifacts.h"
#include "ortrain/training/loss.h"
#include "ortrain/training/prepare_model.h"
#include "ortrain/training/training_program.h"
#include "python/src/attribute_conversion.h"
#include "python/src/device.h"
#include "python/src/init.h"
#include "python/src/plan_sizes.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

// Memory of a torch tensor, kept alive by the tensor.
MutableTensor shared_with(nb::object tensor, Device& device, const std::string& what) {
  const TensorView view = view_anywhere(tensor, what.c_str());
  require_memory(view.data, view.dims, view.rank, what);
  if (view.place != place_of(&device)) {
    throw DeviceError(str(what, " is on device '", name_of(view.place), "'; this state is on '",
                          name_of(place_of(&device)), "'"));
  }
  if (is_negated(tensor)) refuse_negated(what);
  if (!is_row_major(view)) {
    throw UnsupportedError(str(what, " is not dense in row-major order; call contiguous() on it"));
  }
  TensorSpec spec{view.dtype, Dims(view.dims, view.dims + view.rank)};
  if (view.dtype == DType::boolean && device.is_host()) make_plain_bools(view);
  auto* const held = new nb::object(std::move(tensor));
  return {std::move(spec), view.data,
          std::shared_ptr<void>(held,
                                [](void* object) {
                                  nb::gil_scoped_acquire acquire;
                                  delete static_cast<nb::object*>(object);
                                }),
          &device};
}

void set_optimizer_state(TrainingState& state, const std::string& target, nb::handle tensor) {
  const TensorData data = copy_to_tensor_data(tensor, str("the state '", target, "'"));
  const auto found = state.optimizer.find(target);
  if (found == state.optimizer.end()) {
    state.optimizer.emplace(target, MutableTensor::copy_of(data, *state.device));
    return;
  }
  const TensorSpec given{data.dtype(), data.dims()};
  if (found->second.spec.dims != given.dims) {
    throw ShapeError(str("the state '", target, "' is ", tensor_spec_str(given), ", expected ",
                         tensor_spec_str(found->second.spec)));
  }
  found->second = MutableTensor::copy_of(data, *state.device);
}

TrainingOptions options_from(const nb::dict& options) {
  TrainingOptions result;
  result.loss = nb::cast<std::string>(options["loss"]);
  result.accumulation = nb::cast<int64_t>(options["accumulation"]);
  result.scales_loss = nb::cast<bool>(options["scales_loss"]);
  result.memory_limit = nb::cast<uint64_t>(options["memory_limit"]);
  result.budget.bytes = nb::cast<uint64_t>(options["max_bytes"]);
  result.budget.share = nb::cast<double>(options["max_share"]);
  result.optimizer.step = nb::cast<std::string>(options["step"]);
  result.optimizer.max_norm = nb::cast<double>(options["max_norm"]);
  const OpDef& def = op_registry().get(kOrtrainDomain, result.optimizer.step);
  result.optimizer.attributes = attributes_from(options["attributes"], def);
  for (nb::handle item : nb::cast<nb::list>(options["groups"])) {
    const auto group = nb::cast<nb::dict>(item);
    result.optimizer.groups.push_back(
        {.parameters = nb::cast<std::vector<std::string>>(group["params"]),
         .attributes = attributes_from(group["attributes"], def),
         .rate_factor = nb::cast<double>(group["rate_factor"])});
  }
  if (options.contains("owned") && !options["owned"].is_none()) {
    result.owned.emplace();
    for (nb::handle item : nb::cast<nb::list>(options["owned"])) {
      const auto slice = nb::cast<nb::tuple>(item);
      result.owned->push_back({.parameter = nb::cast<std::string>(slice[0]),
                               .begin = nb::cast<int64_t>(slice[1]),
                               .end = nb::cast<int64_t>(slice[2])});
    }
    result.sum_norms = nb::cast<std::string>(options["sum_norms"]);
  }
  return result;
}

// The tensors of a call, and what keeps them alive.
struct Inputs {
  std::vector<InputTensor> tensors;
  std::vector<nb::object> kept;

  Inputs(const Graph& graph, const nb::list& given, dlpack::Device place) {
    std::vector<std::string> names;
    for (const GraphInput& input : graph.inputs()) {
      if (input.role == InputRole::user) names.push_back(graph.value(input.value).name);
    }
    for (size_t i = 0; i < given.size(); ++i) {
      const std::string name = i < names.size() ? names[i] : std::to_string(i);
      BorrowedTensor tensor = borrow(given[i], str("input '", name, "'"), place);
      tensors.push_back({{tensor.dtype, std::move(tensor.dims)}, tensor.data});
      kept.push_back(std::move(tensor.keep_alive));
    }
  }
};

nb::list to_list(const std::vector<RunOutput>& outputs, dlpack::Device place) {
  nb::list result;
  for (const RunOutput& output : outputs) {
    if (output.block) {
      result.append(to_torch(output, place));
    } else {
      result.append(nb::none());
    }
  }
  return result;
}

nb::tuple to_tuple(const StepResult& result, dlpack::Device place) {
  nb::object norm = nb::none();
  if (result.gradient_norm) norm = nb::cast(*result.gradient_norm);
  if (result.gradient_norm_on_device) norm = to_torch(*result.gradient_norm_on_device, place);
  return nb::make_tuple(to_list(result.outputs, place), result.updated, result.all_finite, norm);
}

StepKind step_kind(const std::string& name) {
  if (name == "whole") return StepKind::whole;
  if (name == "first") return StepKind::first;
  if (name == "next") return StepKind::next;
  if (name == "last") return StepKind::last;
  throw InvalidModelError(str("'", name, "' is none of whole, first, next, last"));
}

// Runs a step of a program on the tensors of a call, without the interpreter's lock.
template <class Step>
nb::tuple run_step(const TrainingProgram& program, TrainingState& state, const nb::list& tensors,
                   const Step& step) {
  const dlpack::Device place = place_of(&program.device());
  const Inputs inputs(program.model(), tensors, place);
  state.stream = current_stream(place);
  StepResult result;
  {
    nb::gil_scoped_release release;
    result = step(inputs.tensors);
  }
  return to_tuple(result, place);
}

// A counter of a state, which waits for the device where steps are to be taken back.
template <auto kCounter>
int64_t settled(TrainingState& state) {
  const nb::gil_scoped_release release;
  state.settle();
  return state.*kCounter;
}
template <auto kCounter>
void set_settled(TrainingState& state, int64_t number) {
  const nb::gil_scoped_release release;
  state.settle_now();
  state.*kCounter = number;
}

}  // namespace

void init_training(nb::module_& module) {
  nb::class_<TrainingState>(module, "TrainingState")
      .def(
          "__init__",
          [](TrainingState* self, const std::string& device) {
            new (self) TrainingState();
            self->device = &find_device(device).kernels->device();
          },
          nb::arg("device") = "cpu")
      .def_rw("learning_rate", &TrainingState::learning_rate)
      .def_rw("loss_scale", &TrainingState::loss_scale)
      .def_prop_rw("steps", &settled<&TrainingState::steps>, &set_settled<&TrainingState::steps>)
      .def_prop_rw("kept_batches", &settled<&TrainingState::kept_batches>,
                   &set_settled<&TrainingState::kept_batches>)
      .def_prop_rw(
          "updates",
          [](TrainingState& state) {
            {
              const nb::gil_scoped_release release;
              state.settle();
            }
            return state.updates();
          },
          &TrainingState::set_updates, "Updates that each parameter has had.")
      .def_rw("kept_parameters", &TrainingState::kept_parameters)
      .def_rw("seed", &TrainingState::seed)
      .def_rw("runs", &TrainingState::runs)
      .def(
          "share",
          [](TrainingState& state, const std::string& target, nb::object tensor) {
            state.tensors[target] =
                shared_with(std::move(tensor), *state.device, str("'", target, "'"));
          },
          nb::arg("target"), nb::arg("tensor"),
          "Make a torch tensor a parameter or buffer, in its own memory.")
      .def(
          "share_state",
          [](TrainingState& state, const std::string& target, nb::object tensor) {
            state.optimizer[target] =
                shared_with(std::move(tensor), *state.device, str("'", target, "'"));
          },
          nb::arg("target"), nb::arg("tensor"),
          "Make a torch tensor a state of the optimizer, in its own memory.")
      .def_prop_ro("tensors", [](const TrainingState& s) { return to_torch(s.tensors); })
      .def_prop_ro("optimizer", [](const TrainingState& s) { return to_torch(s.optimizer); })
      .def("set_optimizer_state", &set_optimizer_state, nb::arg("target"), nb::arg("tensor"))
      .def(
          "keep",
          [](TrainingState& s, const std::vector<std::string>& targets) {
            const std::set<std::string> kept(targets.begin(), targets.end());
            std::erase_if(s.tensors,
                          [&](const auto& entry) { return !kept.contains(entry.first); });
            std::erase_if(s.optimizer, [&](const auto& entry) {
              return !kept.contains(entry.first.substr(0, entry.first.rfind(':')));
            });
            std::map<std::string, int64_t> updates = s.updates();
            if (std::erase_if(updates,
                              [&](const auto& entry) { return !kept.contains(entry.first); }) > 0) {
              s.set_updates(updates);
            }
          },
          nb::arg("targets"), "Forget all other tensors, and their states.")
      .def(
          "drop_state",
          [](TrainingState& s, const std::string& target) { s.optimizer.erase(target); },
          nb::arg("target"), "Forget a state of the optimizer, if there is one.")
      .def("clear_optimizer", [](TrainingState& s) {
        s.optimizer.clear();
        s.set_updates({});
      });

  nb::borrow<nb::class_<Graph>>(module.attr("Graph"))
      .def("select_outputs", &select_outputs, nb::arg("names"))
      .def("expose_value", &expose_value, nb::arg("name"))
      .def(
          "add_loss",
          [](Graph& graph, const std::string& loss, const std::string& output,
             const std::string& target, const std::string& name) {
            add_loss(graph, loss_from_name(loss), output, target, name);
          },
          nb::arg("loss"), nb::arg("output") = "", nb::arg("target") = "target",
          nb::arg("name") = "loss")
      .def("prepare_for_others", &prepare_for_others, nb::arg("outputs"))
      .def("draw_dropout_per_run", &draw_dropout_per_run)
      .def("leave_out_training", &leave_out_training)
      // Names of the layers.
      .def("batch_normalizations_in_training", [](const Graph& graph) {
        nb::list names;
        for (NodeId id : batch_normalizations_in_training(graph)) {
          const Node& node = graph.node(id);
          names.append(node.name.empty() ? node.op : node.name);
        }
        return names;
      });

  nb::class_<TrainingProgram>(module, "TrainingProgram")
      .def(
          "__init__",
          [](TrainingProgram* self, const Graph& model, const nb::dict& options,
             const std::string& device) {
            new (self) TrainingProgram(model, options_from(options), *find_device(device).kernels);
          },
          nb::arg("model"), nb::arg("options"), nb::arg("device") = "cpu")
      .def_static(
          "from_graphs",
          [](const Graph& training, const Graph& optimizer, const Graph& evaluation) {
            return new TrainingProgram(training, optimizer, evaluation, cpu_kernels());
          },
          nb::arg("training"), nb::arg("optimizer"), nb::arg("evaluation"))
      .def_prop_ro("trained", &TrainingProgram::trained)
      .def("train_step",
           [](const TrainingProgram& program, TrainingState& state, const nb::list& tensors) {
             return run_step(program, state, tensors,
                             [&](const auto& inputs) { return program.train_step(state, inputs); });
           })
      .def(
          "add_gradients",
          [](const TrainingProgram& program, TrainingState& state, const nb::list& tensors,
             const nb::object& finished, size_t bytes) {
            GradientListener listener;
            if (!finished.is_none()) {
              listener = {bytes, [&](const std::vector<std::string>& parameters) {
                            const nb::gil_scoped_acquire acquire;
                            finished(parameters);
                          }};
            }
            return run_step(program, state, tensors, [&](const auto& inputs) {
              return program.add_gradients(state, inputs, listener);
            });
          },
          nb::arg("state"), nb::arg("tensors"), nb::arg("finished").none() = nb::none(),
          nb::arg("bytes") = 0)
      .def("optimizer_step",
           [](const TrainingProgram& program, TrainingState& state) {
             return run_step(program, state, nb::list(),
                             [&](const auto&) { return program.optimizer_step(state); });
           })
      .def("evaluate",
           [](const TrainingProgram& program, TrainingState& state, const nb::list& tensors) {
             const dlpack::Device place = place_of(&program.device());
             const Inputs inputs(program.evaluation_model(), tensors, place);
             state.stream = current_stream(place);
             std::vector<RunOutput> outputs;
             {
               nb::gil_scoped_release release;
               outputs = program.evaluate(state, inputs.tensors);
             }
             return to_list(outputs, place);
           })
      .def("make_states", &TrainingProgram::make_states)
      .def("graph",
           [](const TrainingProgram& program, const std::string& kind) {
             return std::make_shared<Graph>(program.graph(step_kind(kind)));
           })
      .def("unfused_graph",
           [](const TrainingProgram& program, const std::string& kind, TrainingState& state) {
             return std::make_shared<Graph>(make_training_graph(
                 program.model(), program.options_for(state), step_kind(kind), false));
           })
      .def_prop_ro("memory_plan",
                   [](const TrainingProgram& program) {
                     const std::shared_ptr<const ExecutionPlan> plan = program.last_plan();
                     return plan == nullptr ? nb::dict() : plan_sizes(*plan);
                   })
      .def_static("reset_gradients", &TrainingProgram::reset_gradients);
  module.def(
      "optimizer_states",
      [](const std::string& step, nb::handle attributes) {
        return optimizer_states(
            step, attributes_from(attributes, op_registry().get(kOrtrainDomain, step)));
      },
      nb::arg("step"), nb::arg("attributes"), "Names of the states that a step operator keeps.");
  module.def(
      "write_artifacts",
      [](const std::filesystem::path& folder, const Graph& model, const nb::dict& values,
         const nb::dict& options, double learning_rate, const std::string& prefix) {
        const std::map<std::string, TensorData> contents = copy_to_tensor_data(values);
        const TrainingOptions chosen = options_from(options);
        nb::gil_scoped_release release;
        write_artifacts(folder, model, contents, chosen, learning_rate, prefix);
      },
      nb::arg("folder"), nb::arg("model"), nb::arg("values"), nb::arg("options"),
      nb::arg("learning_rate"), nb::arg("prefix") = "");
  module.def("export_for_inference", &export_for_inference, nb::arg("evaluation"), nb::arg("state"),
             nb::arg("outputs"), nb::arg("path"));
}

}  // namespace ortrain::python
