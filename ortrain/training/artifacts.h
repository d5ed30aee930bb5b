// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "ortrain/training/training_program.h"

// What a program needs to train without the model's source:
//
//   folder/training_model.onnx    forward, loss and backward; adds to the kept gradients
//          eval_model.onnx        forward and loss, without dropout
//          optimizer_model.onnx   reads the kept gradients, updates the parameters
//          checkpoint/            parameters, buffers and, later, the optimizer's states

namespace ortrain {

inline constexpr const char* kTrainingModel = "training_model.onnx";
inline constexpr const char* kEvaluationModel = "eval_model.onnx";
inline constexpr const char* kOptimizerModel = "optimizer_model.onnx";
inline constexpr const char* kCheckpointFolder = "checkpoint";

// `model` as for make_training_graph; `values` are the contents of its parameters and buffers.
// The names of the files begin with `prefix`. Throws FileError, and what making the graphs throws.
void write_artifacts(const std::filesystem::path& folder, const Graph& model,
                     const std::map<std::string, TensorData>& values,
                     const TrainingOptions& options, double learning_rate,
                     const std::string& prefix = "");

struct LoadedArtifacts {
  std::unique_ptr<TrainingProgram> program;
  std::unique_ptr<TrainingState> state;
};

// Throws FileError and InvalidModelError for what is missing or damaged.
LoadedArtifacts load_artifacts(const std::filesystem::path& folder, const KernelRegistry& kernels);

// Writes the model of an evaluation graph, with these of its outputs, for other programs: in
// standard operators, with the weights of the state. Empty: all outputs.
void export_for_inference(const Graph& evaluation, const TrainingState& state,
                          const std::vector<std::string>& outputs,
                          const std::filesystem::path& path);

}  // namespace ortrain
