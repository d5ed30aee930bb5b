// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ortrain/ir/graph.h"
#include "ortrain/ir/node_spec.h"
#include "ortrain/runtime/device.h"

namespace ortrain {

// A dense row-major tensor that may be written to. Copies share the memory.
struct MutableTensor {
  TensorSpec spec;
  void* data = nullptr;
  std::shared_ptr<void> owner;      // keeps `data` alive
  Device* device = &host_device();  // whose memory

  // 64-byte aligned, contents undefined.
  static MutableTensor allocate(TensorSpec spec, Device& device = host_device());
  static MutableTensor zeros(TensorSpec spec, Device& device = host_device());
  static MutableTensor copy_of(const TensorData& data, Device& device = host_device());
  // The same contents in memory of its own, on the same device or another one.
  MutableTensor clone() const { return clone(*device); }
  MutableTensor clone(Device& on) const;
  // Itself where the host can read it, else a copy: waits for all work of the device.
  MutableTensor on_host() const;
  // Takes over the contents of another one of the same type and shape.
  void assign(const MutableTensor& other) const;
};

// Everything that training changes: parameters, buffers, what the optimizer keeps, and counters.
// One state may serve several programs, of graphs for other shapes or other purposes, in turn. Not
// thread-safe.
class TrainingState {
 public:
  TrainingState() = default;
  TrainingState(const TrainingState&) = delete;
  TrainingState& operator=(const TrainingState&) = delete;

  // Parameters and buffers by target. An entry may be replaced by one of the same type and shape.
  std::map<std::string, MutableTensor> tensors;
  // Optimizer states and kept gradients by target; made, as zeros, when first needed.
  std::map<std::string, MutableTensor> optimizer;

  // Where the program that uses the state runs, and the queue of its work.
  Device* device = &host_device();
  void* stream = nullptr;

  double learning_rate = 1e-3;
  double loss_scale = 1.0;
  int64_t steps = 0;                         // steps of the optimizer that were made
  int64_t kept_batches = 0;                  // whose gradients are kept for the next step
  std::vector<std::string> kept_parameters;  // of which there are some
  // Random numbers of run n come from `seed` and n.
  uint64_t seed = 0;
  uint64_t runs = 0;

  // Updates that a parameter has had: of one that begins later, or that steps leave out, fewer than
  // `steps`. Where nothing is known of it, `steps` if it has states, as states of older files do.
  int64_t updates_of(const std::string& parameter) const;
  // Of all parameters that have had some, or have states.
  std::map<std::string, int64_t> updates() const;
  // Forgets what is known. `given`: by parameter; of others as at first.
  void set_updates(const std::map<std::string, int64_t>& given);
  // Before a step that updates these and no others.
  void begin_update(const std::vector<std::string>& parameters);
  // Before a state, of a target, is made as zeros: its parameter has had no update, if it has none
  // yet.
  void begin_state(const std::string& target);
  // Whether all parameters of the latest begin_update() have had as many updates as the others.
  bool updates_alike() const { return alike_; }

  // The seed of the next run; counts it.
  int64_t draw_seed();

  // Steps that were on their way to the device when a kernel found a wrong label or index changed
  // nothing, and batches among them left kept gradients that are of no use. Takes them back from
  // the counters. Waits for the device only where an error was raised since the last call.
  void settle();
  // The same at once, for what is known on the device by now: before counters are set anew, which
  // no error that is raised later then changes.
  void settle_now();
  // Two numbers on the device, made as zeros: steps and batches that settle() takes back.
  int64_t* undone();

 private:
  bool has_states(const std::string& parameter) const;

  // Of the latest step, and by how much fewer updates than steps each has had. What was updated by
  // others keeps its number.
  std::vector<std::string> updated_;
  std::map<std::string, int64_t> behind_, idle_;
  bool began_ = false;  // only since then nothing is known of others but that they had no update
  bool alike_ = true;
  MutableTensor undone_;
  int64_t raised_before_ = 0;  // Device::num_raised when it was settled
};

}  // namespace ortrain
