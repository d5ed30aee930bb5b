// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "ortrain/ir/node_spec.h"
#include "ortrain/runtime/device.h"

namespace ortrain {

// A tensor that an external function reads or writes: dense, row-major, valid during the call only.
struct ExternalTensor {
  TensorSpec spec;
  void* data = nullptr;            // null: absent
  const Device* device = nullptr;  // whose memory; null: the host's
};

// What an ortrain::External node runs: code outside of the engine, with a backward of its own. Its
// methods may be called from any thread, several at a time.
class ExternalFunction {
 public:
  virtual ~ExternalFunction() = default;

  // Writes the results. A backward may follow for the operands numbered `tracked`: returns what it
  // will need, unless there are none.
  virtual std::shared_ptr<void> forward(std::span<const ExternalTensor> operands,
                                        std::span<const ExternalTensor> results,
                                        std::span<const int64_t> tracked) const = 0;
  // `kept`: what the forward returned. `incoming`: the gradients of the results numbered `results`;
  // those of the others are zero. Writes the gradients of the operands numbered `operands`.
  virtual void backward(void* kept, std::span<const int64_t> results,
                        std::span<const ExternalTensor> incoming, std::span<const int64_t> operands,
                        std::span<const ExternalTensor> gradients) const = 0;
};

// The external functions of the process by key. Thread-safe.
class ExternalFunctions {
 public:
  static ExternalFunctions& instance();

  // Throws InternalError if the key is taken.
  void add(const std::string& key, std::shared_ptr<const ExternalFunction> function);
  // Plans that were made before keep the function.
  void remove(const std::string& key);
  // Null where there is none.
  std::shared_ptr<const ExternalFunction> find(const std::string& key) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const ExternalFunction>> functions_;
};

}  // namespace ortrain
