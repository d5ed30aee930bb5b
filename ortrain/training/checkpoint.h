// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "ortrain/training/training_state.h"

// A folder of checkpoints, newest last:
//
//   folder/checkpoint-00000007/manifest.json          counters, properties, digests of the files
//                              parameters.safetensors parameters and buffers
//                              optimizer.safetensors  optimizer states, gradients that are kept
//
// A checkpoint is written aside, flushed, and takes its name in one step, so that a crash leaves
// the one before it. The manifest stands for all of it: it has a digest of its own.

namespace ortrain {

// What a program keeps with a checkpoint.
using CheckpointProperty = std::variant<int64_t, double, std::string>;
using CheckpointProperties = std::map<std::string, CheckpointProperty>;

struct CheckpointOptions {
  bool optimizer = true;  // with the optimizer's states
  size_t keep = 2;        // checkpoints of the folder that stay, this one among them
  // How long to wait for another saver in the folder; then FileError names it.
  std::chrono::milliseconds patience = std::chrono::minutes(10);
};

// Writes the next checkpoint of a folder, which is made if need be; older ones go once it is there.
// Returns its path. Throws FileError, and what a device has found wrong in the steps before; the
// checkpoints that were there stay.
std::filesystem::path save_checkpoint(const std::filesystem::path& folder, TrainingState& state,
                                      const CheckpointProperties& properties = {},
                                      const CheckpointOptions& options = {});

struct Checkpoint {
  std::filesystem::path path;
  std::map<std::string, MutableTensor> tensors;
  std::map<std::string, MutableTensor> optimizer;
  bool has_optimizer = false;
  double learning_rate = 0, loss_scale = 1;
  int64_t steps = 0, kept_batches = 0;
  std::map<std::string, int64_t> updates;  // of parameters that have had fewer than `steps`
  uint64_t seed = 0, runs = 0;
  CheckpointProperties properties;
  // Newer checkpoints that were passed over, each with what is wrong with it.
  std::vector<std::string> passed_over;
};

// Reads the newest complete checkpoint of a folder, or the one whose own folder this is. All bytes
// are checked before anything is returned. Throws FileError where none is complete, with the reason
// for each.
Checkpoint load_checkpoint(const std::filesystem::path& folder);

// Puts a checkpoint into a state: its counters, optimizer states, and the contents of those tensors
// that both have, in the memory of the state. With `strict` both must have the same tensors, and
// types and shapes must agree in any case; nothing changes otherwise. Throws InvalidModelError
// naming a tensor. Where the state has no tensors yet it takes those of the checkpoint. Without
// optimizer states in it the optimizer starts anew, at step 0.
void restore(TrainingState& state, const Checkpoint& checkpoint, bool strict = true);

}  // namespace ortrain
