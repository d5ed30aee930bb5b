// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/capi/ortrain.h"

#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/error.h"
#include "ortrain/base/log.h"
#include "ortrain/base/optimizer_numbers.h"
#include "ortrain/ir/onnx_io.h"
#include "ortrain/ir/roles.h"
#include "ortrain/training/artifacts.h"
#include "ortrain/training/checkpoint.h"
#include "ortrain/training/loss.h"
#include "ortrain/training/prepare_model.h"

struct ortrain_trainer {
  std::unique_ptr<ortrain::TrainingProgram> program;
  std::unique_ptr<ortrain::TrainingState> state;
  // Linear schedule; no rate is set without one.
  int64_t warmup = 0, total = 0;
  double initial_rate = 0;
};

struct ortrain_outputs {
  std::vector<ortrain::RunOutput> outputs;
};

namespace {

using namespace ortrain;  // NOLINT: the functions below belong to no namespace

thread_local std::string last_error;

class ArgumentError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void require(bool given, const char* name) {
  if (!given) throw ArgumentError(std::string("argument '") + name + "' is null");
}

ortrain_status fail(ortrain_status status, const char* message) {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();  // no memory even for that
  }
  return status;
}

template <class Fn>
ortrain_status guarded(const Fn& fn) {
  try {
    last_error.clear();
    fn();
    return ORTRAIN_OK;
  } catch (const ArgumentError& error) {
    return fail(ORTRAIN_INVALID_ARGUMENT, error.what());
  } catch (const InvalidModelError& error) {
    return fail(ORTRAIN_INVALID_MODEL, error.what());
  } catch (const ShapeError& error) {
    return fail(ORTRAIN_INVALID_SHAPE, error.what());
  } catch (const DTypeError& error) {
    return fail(ORTRAIN_INVALID_TYPE, error.what());
  } catch (const IndexError& error) {
    return fail(ORTRAIN_INDEX, error.what());
  } catch (const UnsupportedError& error) {
    return fail(ORTRAIN_UNSUPPORTED, error.what());
  } catch (const FileError& error) {
    return fail(ORTRAIN_FILE, error.what());
  } catch (const OutOfMemoryError& error) {
    return fail(ORTRAIN_OUT_OF_MEMORY, error.what());
  } catch (const NanError& error) {
    return fail(ORTRAIN_NAN, error.what());
  } catch (const std::bad_alloc&) {
    return fail(ORTRAIN_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return fail(ORTRAIN_INTERNAL, error.what());
  } catch (...) {
    return fail(ORTRAIN_INTERNAL, "an error without a description");
  }
}

void require_number(const char* name, double value) {
  const std::string reason = out_of_range(name, value);
  if (!reason.empty()) throw ArgumentError(reason);
}

void require_numbers(const ortrain_options& given) {
  require_number("learning_rate", given.learning_rate);
  require_number("weight_decay", given.weight_decay);
  require_number("beta1", given.beta1);
  require_number("beta2", given.beta2);
  if (!(given.epsilon < 0)) require_number("epsilon", given.epsilon);
  require_number("momentum", given.momentum);
  require_number("max_norm", given.max_norm);
  if (given.accumulation < 1) {
    throw ArgumentError(str("'accumulation' is ", given.accumulation, ", expected 1 or more"));
  }
}

// The step and its numbers, by the name of the optimizer.
void set_optimizer(const ortrain_options& given, OptimizerOptions& options) {
  const std::string name = given.optimizer == nullptr ? "adamw" : given.optimizer;
  Attributes& attributes = options.attributes;
  attributes["weight_decay"] = given.weight_decay;
  if (name == "sgd") {
    options.step = "SgdStep";
    attributes["momentum"] = given.momentum;
  } else if (name == "adagrad") {
    options.step = "AdagradStep";
  } else if (name == "adamw" || name == "adam" || name == "lamb") {
    options.step = name == "lamb" ? "LambStep" : "AdamStep";
    attributes["beta1"] = given.beta1;
    attributes["beta2"] = given.beta2;
    if (name == "adam") attributes["decay_mode"] = std::string("l2");
  } else {
    throw InvalidModelError("there is no optimizer '" + name +
                            "'; there are adamw, adam, sgd, lamb, adagrad");
  }
  if (given.epsilon >= 0 && name != "sgd") attributes["epsilon"] = given.epsilon;
  options.max_norm = given.max_norm;
}

struct Prepared {
  OnnxModel model;
  TrainingOptions options;
};

Prepared prepare(const char* path, const ortrain_options& given) {
  require_numbers(given);
  LoadOptions load{.initializers = LoadOptions::Initializers::weights};
  if (given.trained != nullptr) {
    load.initializers = LoadOptions::Initializers::parameters;
    if (given.num_trained == 0) throw InvalidModelError("'trained' names no parameter");
    for (size_t i = 0; i < given.num_trained; ++i) {
      require(given.trained[i] != nullptr, "trained");
      load.parameter_names.emplace_back(given.trained[i]);
    }
  }
  Prepared prepared{.model = load_onnx_model(path, load)};
  const std::string output = given.loss_output == nullptr ? "" : given.loss_output;
  prepared.options.loss = output;
  if (given.loss != nullptr) {
    prepared.options.loss = "loss";
    add_loss(prepared.model.graph, loss_from_name(given.loss), output,
             given.target == nullptr ? "target" : given.target, prepared.options.loss);
  } else if (output.empty()) {
    throw InvalidModelError("'loss_output' names the loss where 'loss' is null");
  }
  set_optimizer(given, prepared.options.optimizer);
  prepared.options.accumulation = given.accumulation;
  return prepared;
}

std::vector<InputTensor> inputs_from(const ortrain_tensor* tensors, size_t count) {
  require(tensors != nullptr || count == 0, "inputs");
  std::vector<InputTensor> inputs;
  for (size_t i = 0; i < count; ++i) {
    const ortrain_tensor& tensor = tensors[i];
    const std::optional<DType> dtype = dtype_from_onnx(tensor.dtype);
    if (!dtype) {
      throw DTypeError(str("input ", i, " has the element type ", static_cast<int>(tensor.dtype)));
    }
    if (tensor.rank > kMaxRank) throw ShapeError(str("input ", i, " has ", tensor.rank, " axes"));
    require(tensor.dims != nullptr || tensor.rank == 0, "dims");
    TensorSpec spec{*dtype, Dims(tensor.dims, tensor.dims + tensor.rank)};
    with_context(str("input ", i, ": "), [&] { check_extents(spec.dims, size_of(*dtype)); });
    require(tensor.data != nullptr || spec.bytes() == 0, "data");
    inputs.push_back({std::move(spec), tensor.data});
  }
  return inputs;
}

void give(std::vector<RunOutput> made, ortrain_outputs** outputs) {
  if (outputs != nullptr) *outputs = new ortrain_outputs{std::move(made)};
}

const Graph& model_of(const ortrain_trainer& trainer, int evaluation) {
  return evaluation != 0 ? trainer.program->evaluation_model() : trainer.program->model();
}

std::vector<const std::string*> input_names(const Graph& graph) {
  std::vector<const std::string*> names;
  for (const GraphInput& input : graph.inputs()) {
    if (input.role == InputRole::user) names.push_back(&graph.value(input.value).name);
  }
  return names;
}

std::vector<const std::string*> output_names(const Graph& graph) {
  std::vector<const std::string*> names;
  for (const GraphOutput& output : graph.outputs()) {
    if (output.role == OutputRole::user) names.push_back(&output.name);
  }
  return names;
}

void give_name(const std::vector<const std::string*>& names, size_t index, const char** name) {
  require(name != nullptr, "name");
  if (index >= names.size()) {
    throw ArgumentError(str("index ", index, " is out of range: there are ", names.size()));
  }
  *name = names[index]->c_str();
}

// The rate of the step that comes next, by how many were made: also those before a checkpoint.
void set_scheduled_rate(ortrain_trainer& trainer) {
  const auto step = static_cast<double>(trainer.state->steps);
  const auto warmup = static_cast<double>(trainer.warmup);
  const auto total = static_cast<double>(trainer.total);
  const double factor =
      step < warmup ? step / warmup : std::max(0.0, (total - step) / std::max(1.0, total - warmup));
  trainer.state->learning_rate = trainer.initial_rate * factor;
}

// Parameters in the order of their names.
std::vector<const MutableTensor*> parameters_of(const ortrain_trainer& trainer, bool trained_only) {
  std::vector<std::string> names = trainer.program->trained();
  if (!trained_only) {
    names.clear();
    for (const GraphInput& input : trainer.program->model().inputs()) {
      if (input.role == InputRole::parameter) names.push_back(input.target);
    }
  }
  std::ranges::sort(names);
  std::vector<const MutableTensor*> result;
  for (const std::string& name : names) result.push_back(&trainer.state->tensors.at(name));
  return result;
}

size_t count_elements(const std::vector<const MutableTensor*>& tensors) {
  size_t count = 0;
  for (const MutableTensor* tensor : tensors) count += static_cast<size_t>(tensor->spec.numel());
  return count;
}

// fn(buffer, tensor's elements, count) for each tensor; the elements have its type.
template <class Buffer, class Fn>
void for_parameters(const ortrain_trainer* trainer, int trained_only, Buffer* buffer, size_t count,
                    const Fn& fn) {
  require(trainer != nullptr, "trainer");
  const auto tensors = parameters_of(*trainer, trained_only != 0);
  const size_t expected = count_elements(tensors);
  if (count != expected) {
    throw ArgumentError(str("'count' is ", count, ", the parameters have ", expected, " numbers"));
  }
  require(buffer != nullptr || count == 0, "buffer");
  for (const MutableTensor* tensor : tensors) {
    const int64_t n = tensor->spec.numel();
    dispatch_float(tensor->spec.dtype, [&](auto tag) {
      fn(buffer, static_cast<typename decltype(tag)::type*>(tensor->data), n);
    });
    buffer += n;
  }
}

}  // namespace

extern "C" {

const char* ortrain_version(void) { return ORTRAIN_VERSION; }

const char* ortrain_last_error(void) { return last_error.c_str(); }

void ortrain_default_options(ortrain_options* options) {
  if (options == nullptr) return;
  *options = {.loss = nullptr,
              .loss_output = nullptr,
              .target = "target",
              .optimizer = "adamw",
              .learning_rate = 1e-3,
              .weight_decay = 0.0,
              .beta1 = 0.9,
              .beta2 = 0.999,
              .epsilon = -1.0,
              .momentum = 0.0,
              .max_norm = 0.0,
              .accumulation = 1,
              .trained = nullptr,
              .num_trained = 0};
}

void ortrain_set_log_callback(ortrain_log_callback callback, void* context) {
  guarded([&] {
    if (callback == nullptr) {
      set_log_sink(nullptr);
      return;
    }
    set_log_sink([callback, context](std::string_view category, std::string_view line) {
      callback(std::string(category).c_str(), std::string(line).c_str(), context);
    });
  });
}

ortrain_status ortrain_create_from_artifacts(const char* folder, ortrain_trainer** trainer) {
  return guarded([&] {
    require(folder != nullptr, "folder");
    require(trainer != nullptr, "trainer");
    LoadedArtifacts loaded = load_artifacts(folder, cpu_kernels());
    auto made = std::make_unique<ortrain_trainer>();
    made->program = std::move(loaded.program);
    made->state = std::move(loaded.state);
    *trainer = made.release();
  });
}

ortrain_status ortrain_create_from_onnx(const char* path, const ortrain_options* options,
                                        ortrain_trainer** trainer) {
  return guarded([&] {
    require(path != nullptr, "path");
    require(options != nullptr, "options");
    require(trainer != nullptr, "trainer");
    Prepared prepared = prepare(path, *options);
    auto made = std::make_unique<ortrain_trainer>();
    Graph evaluation = prepared.model.graph;
    leave_out_training(evaluation);
    draw_dropout_per_run(prepared.model.graph);
    made->program = std::make_unique<TrainingProgram>(std::move(prepared.model.graph),
                                                      std::move(prepared.options), cpu_kernels(),
                                                      std::move(evaluation));
    made->state = std::make_unique<TrainingState>();
    made->state->learning_rate = options->learning_rate;
    for (const auto& [name, data] : prepared.model.values) {
      made->state->tensors.emplace(name, MutableTensor::copy_of(data));
    }
    made->program->require_tensors(*made->state);
    *trainer = made.release();
  });
}

ortrain_status ortrain_write_artifacts(const char* path, const ortrain_options* options,
                                       const char* folder) {
  return guarded([&] {
    require(path != nullptr, "path");
    require(options != nullptr, "options");
    require(folder != nullptr, "folder");
    const Prepared prepared = prepare(path, *options);
    write_artifacts(folder, prepared.model.graph, prepared.model.values, prepared.options,
                    options->learning_rate);
  });
}

void ortrain_destroy(ortrain_trainer* trainer) { delete trainer; }

ortrain_status ortrain_train_step(ortrain_trainer* trainer, const ortrain_tensor* inputs,
                                  size_t num_inputs, ortrain_outputs** outputs) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    const std::vector<InputTensor> given = inputs_from(inputs, num_inputs);
    give(trainer->program->add_gradients(*trainer->state, given).outputs, outputs);
  });
}

ortrain_status ortrain_optimizer_step(ortrain_trainer* trainer) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    trainer->program->optimizer_step(*trainer->state);
  });
}

ortrain_status ortrain_lazy_reset_grad(ortrain_trainer* trainer) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    TrainingProgram::reset_gradients(*trainer->state);
  });
}

ortrain_status ortrain_eval_step(ortrain_trainer* trainer, const ortrain_tensor* inputs,
                                 size_t num_inputs, ortrain_outputs** outputs) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    const std::vector<InputTensor> given = inputs_from(inputs, num_inputs);
    give(trainer->program->evaluate(*trainer->state, given), outputs);
  });
}

size_t ortrain_output_count(const ortrain_outputs* outputs) {
  return outputs == nullptr ? 0 : outputs->outputs.size();
}

ortrain_status ortrain_output(const ortrain_outputs* outputs, size_t index,
                              ortrain_tensor* tensor) {
  return guarded([&] {
    require(outputs != nullptr, "outputs");
    require(tensor != nullptr, "tensor");
    if (index >= outputs->outputs.size()) {
      throw ArgumentError(
          str("index ", index, " is out of range: there are ", outputs->outputs.size()));
    }
    const RunOutput& output = outputs->outputs[index];
    *tensor = {.dtype = static_cast<ortrain_dtype>(output.spec.dtype),
               .rank = output.spec.dims.size(),
               .dims = output.spec.dims.data(),
               .data = output.block->data()};
  });
}

void ortrain_destroy_outputs(ortrain_outputs* outputs) { delete outputs; }

size_t ortrain_model_input_count(const ortrain_trainer* trainer, int evaluation) {
  if (trainer == nullptr) return 0;
  return static_cast<size_t>(std::ranges::count(model_of(*trainer, evaluation).inputs(),
                                                InputRole::user, &GraphInput::role));
}

size_t ortrain_model_output_count(const ortrain_trainer* trainer, int evaluation) {
  if (trainer == nullptr) return 0;
  return static_cast<size_t>(std::ranges::count(model_of(*trainer, evaluation).outputs(),
                                                OutputRole::user, &GraphOutput::role));
}

ortrain_status ortrain_model_input_name(const ortrain_trainer* trainer, int evaluation,
                                        size_t index, const char** name) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    give_name(input_names(model_of(*trainer, evaluation)), index, name);
  });
}

ortrain_status ortrain_model_output_name(const ortrain_trainer* trainer, int evaluation,
                                         size_t index, const char** name) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    give_name(output_names(model_of(*trainer, evaluation)), index, name);
  });
}

ortrain_status ortrain_get_learning_rate(const ortrain_trainer* trainer, double* rate) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    require(rate != nullptr, "rate");
    *rate = trainer->state->learning_rate;
  });
}

ortrain_status ortrain_set_learning_rate(ortrain_trainer* trainer, double rate) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    require_number("rate", rate);
    trainer->state->learning_rate = rate;
  });
}

ortrain_status ortrain_register_linear_lr_scheduler(ortrain_trainer* trainer, int64_t warmup,
                                                    int64_t total, double rate) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    if (warmup < 0 || total < 1 || warmup > total) {
      throw ArgumentError(str("'warmup' is ", warmup, " and 'total' ", total));
    }
    require_number("rate", rate);
    trainer->warmup = warmup;
    trainer->total = total;
    trainer->initial_rate = rate;
    set_scheduled_rate(*trainer);
  });
}

ortrain_status ortrain_scheduler_step(ortrain_trainer* trainer) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    if (trainer->total == 0) throw ArgumentError("no scheduler is registered");
    set_scheduled_rate(*trainer);
  });
}

ortrain_status ortrain_set_seed(ortrain_trainer* trainer, uint64_t seed) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    trainer->state->seed = seed;
    trainer->state->runs = 0;
  });
}

ortrain_status ortrain_parameters_size(const ortrain_trainer* trainer, int trained_only,
                                       size_t* count) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    require(count != nullptr, "count");
    *count = count_elements(parameters_of(*trainer, trained_only != 0));
  });
}

ortrain_status ortrain_copy_parameters_to_buffer(const ortrain_trainer* trainer, int trained_only,
                                                 float* buffer, size_t count) {
  return guarded([&] {
    for_parameters(trainer, trained_only, buffer, count, [](float* to, auto* from, int64_t n) {
      using T = std::remove_pointer_t<decltype(from)>;
      for (int64_t i = 0; i < n; ++i)
        to[i] = static_cast<float>(static_cast<ComputeType<T>>(from[i]));
    });
  });
}

ortrain_status ortrain_copy_buffer_to_parameters(ortrain_trainer* trainer, int trained_only,
                                                 const float* buffer, size_t count) {
  return guarded([&] {
    for_parameters(trainer, trained_only, buffer, count,
                   [](const float* from, auto* to, int64_t n) {
                     using T = std::remove_pointer_t<decltype(to)>;
                     for (int64_t i = 0; i < n; ++i)
                       to[i] = static_cast<T>(static_cast<ComputeType<T>>(from[i]));
                   });
  });
}

ortrain_status ortrain_save_checkpoint(const ortrain_trainer* trainer, const char* folder,
                                       int with_optimizer) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    require(folder != nullptr, "folder");
    save_checkpoint(folder, *trainer->state, {}, {.optimizer = with_optimizer != 0});
  });
}

ortrain_status ortrain_load_checkpoint(ortrain_trainer* trainer, const char* folder) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    require(folder != nullptr, "folder");
    const Checkpoint checkpoint = load_checkpoint(folder);
    restore(*trainer->state, checkpoint);
    for (const std::string& reason : checkpoint.passed_over) {
      log_line("checkpoint", "passed over " + reason);
    }
  });
}

ortrain_status ortrain_export_for_inference(const ortrain_trainer* trainer, const char* path,
                                            const char* const* outputs, size_t num_outputs) {
  return guarded([&] {
    require(trainer != nullptr, "trainer");
    require(path != nullptr, "path");
    require(outputs != nullptr || num_outputs == 0, "outputs");
    std::vector<std::string> names;
    for (size_t i = 0; i < num_outputs; ++i) {
      require(outputs[i] != nullptr, "outputs");
      names.emplace_back(outputs[i]);
    }
    export_for_inference(trainer->program->evaluation_model(), *trainer->state, names, path);
  });
}

}  // extern "C"
