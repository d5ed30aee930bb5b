// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/artifacts.h"

#include "ortrain/base/error.h"
#include "ortrain/ir/onnx_io.h"
#include "ortrain/training/checkpoint.h"
#include "ortrain/training/prepare_model.h"

namespace ortrain {
namespace {

namespace fs = std::filesystem;

// Weights of more go to a file of their own: a message of protobuf holds 2 GiB.
constexpr size_t kMostInside = size_t{1} << 30;
constexpr size_t kLargeTensor = 1024;

}  // namespace

void write_artifacts(const fs::path& folder, const Graph& model,
                     const std::map<std::string, TensorData>& values,
                     const TrainingOptions& options, double learning_rate,
                     const std::string& prefix) {
  Graph prepared = model;
  draw_dropout_per_run(prepared);
  Graph evaluation = model;
  leave_out_training(evaluation);
  const Graph training = make_training_graph(prepared, options, StepKind::next, /*fused=*/false);
  const Graph optimizer = make_optimizer_graph(prepared, options, /*fused=*/false);
  TrainingState state;
  state.learning_rate = learning_rate;
  for (const GraphInput& input : model.inputs()) {
    if (input.role != InputRole::parameter && input.role != InputRole::buffer) continue;
    const auto found = values.find(input.target);
    if (found == values.end()) {
      throw InvalidModelError(str("there is no value for '", input.target, "'"));
    }
    state.tensors.emplace(input.target, MutableTensor::copy_of(found->second));
  }
  std::error_code code;
  fs::create_directories(folder, code);
  if (code) throw FileError(str("cannot create '", folder.string(), "': ", code.message()));
  save_onnx(training, folder / (prefix + kTrainingModel));
  save_onnx(evaluation, folder / (prefix + kEvaluationModel));
  save_onnx(optimizer, folder / (prefix + kOptimizerModel));
  save_checkpoint(folder / (prefix + kCheckpointFolder), state);
}

LoadedArtifacts load_artifacts(const fs::path& folder, const KernelRegistry& kernels) {
  LoadedArtifacts loaded;
  loaded.program = std::make_unique<TrainingProgram>(load_onnx(folder / kTrainingModel),
                                                     load_onnx(folder / kOptimizerModel),
                                                     load_onnx(folder / kEvaluationModel), kernels);
  loaded.state = std::make_unique<TrainingState>();
  restore(*loaded.state, load_checkpoint(folder / kCheckpointFolder));
  loaded.program->require_tensors(*loaded.state);
  return loaded;
}

void export_for_inference(const Graph& evaluation, const TrainingState& state,
                          const std::vector<std::string>& outputs, const fs::path& path) {
  Graph graph = evaluation;
  prepare_for_others(graph, outputs);
  SaveOptions options{.lists_initializers = false};
  size_t bytes = 0;
  for (const GraphInput& input : graph.inputs()) {
    if (input.role != InputRole::parameter && input.role != InputRole::buffer) continue;
    const auto found = state.tensors.find(input.target);
    if (found == state.tensors.end()) {
      throw InvalidModelError(str("there is no value for '", input.target, "'"));
    }
    const MutableTensor tensor = found->second.on_host();
    options.values.emplace(
        input.target, TensorData(tensor.spec.dtype, tensor.spec.dims, tensor.data, tensor.owner));
    bytes += tensor.spec.bytes();
  }
  if (bytes > kMostInside) options.external_data_threshold = kLargeTensor;
  save_onnx(graph, path, options);
}

}  // namespace ortrain
