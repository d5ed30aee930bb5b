// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Trains models on a device on which kernels need not run, so that what the host does there is
// seen:
//   ortrain_train_models FOLDER
// For each NAME.graph of the folder, a model as text whose first output is the loss, NAME.sizes has
// a line per set of sizes: those of its user inputs, "2,8 2,8". Prints one line of JSON per model,
// and the recordings that are left at the end. The status is 1 where something is thrown that
// should not be, or is not.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/ir/text.h"
#include "ortrain/training/training_program.h"

namespace {

using namespace ortrain;
using Sizes = std::vector<Dims>;  // of the user inputs

struct Model {
  std::string name;
  Graph graph;
  std::vector<Sizes> sizes;
};

std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

Model read_model(const std::filesystem::path& path) {
  Model model{path.stem().string(), parse_graph(contents(path)), {}};
  std::istringstream lines(contents(std::filesystem::path(path).replace_extension(".sizes")));
  for (std::string line; std::getline(lines, line);) {
    Sizes all;
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      Dims dims;
      std::istringstream numbers(word == "-" ? "" : word);
      for (std::string number; std::getline(numbers, number, ',');)
        dims.push_back(std::stoll(number));
      all.push_back(dims);
    }
    model.sizes.push_back(all);
  }
  return model;
}

// Memory as PyTorch's allocator gives it, so that addresses come again; `trim` gives back what
// nobody holds, and whatever still uses that is found.
class CachedMemory {
 public:
  CachedMemory() {
    gpu::set_allocator([this](int, size_t bytes, void*) { return take(bytes); }, nullptr);
  }
  ~CachedMemory() {
    trim();
    gpu::set_allocator(nullptr, nullptr);
  }
  CachedMemory(const CachedMemory&) = delete;
  CachedMemory& operator=(const CachedMemory&) = delete;

  void trim() {
    const std::lock_guard lock(mutex_);
    for (const auto& [bytes, memory] : free_) cudaFree(memory);
    free_.clear();
  }

 private:
  std::shared_ptr<Block> take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    void* memory = nullptr;
    if (const auto found = free_.find(bytes); found != free_.end()) {
      memory = found->second;
      free_.erase(found);
    } else if (cudaMalloc(&memory, bytes) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      throw OutOfMemoryError("no memory");
    }
    return {new Block(memory, bytes), [this](Block* block) {
              const std::lock_guard last(mutex_);
              free_.emplace(block->bytes(), block->data());
              delete block;
            }};
  }

  std::mutex mutex_;
  std::multimap<size_t, void*> free_;
};

// Zeros on the device.
struct Batch {
  Batch(const Graph& graph, const Sizes& sizes) {
    size_t at = 0;
    for (const GraphInput& input : graph.inputs()) {
      if (input.role != InputRole::user) continue;
      const TensorSpec spec{graph.value(input.value).dtype, sizes.at(at++)};
      tensors.push_back(MutableTensor::zeros(spec, gpu::device(0)));
      inputs.push_back({spec, tensors.back().data});
    }
  }
  std::vector<MutableTensor> tensors;
  std::vector<InputTensor> inputs;
};

void fill_state(const Graph& graph, TrainingState& state) {
  state.device = &gpu::device(0);
  for (const GraphInput& input : graph.inputs()) {
    if (input.role != InputRole::parameter && input.role != InputRole::buffer) continue;
    const Value& value = graph.value(input.value);
    state.tensors[input.target] =
        MutableTensor::zeros({value.dtype, to_dims(value.shape)}, gpu::device(0));
  }
}

TrainingOptions options_of(const Graph& graph, const std::string& step, int64_t accumulation) {
  TrainingOptions options;
  options.loss = graph.outputs().at(0).name;
  options.optimizer.step = step;
  options.optimizer.max_norm = 1.0;
  options.accumulation = accumulation;
  return options;
}

// Steps at each size until they are recorded, sizes by turns, evaluations between, a fault on the
// way, and steps behind it.
void train(const Model& model, const std::string& step, int64_t accumulation) {
  CachedMemory memory;
  const TrainingProgram program(model.graph, options_of(model.graph, step, accumulation),
                                gpu::kernels(0));
  TrainingState state;
  fill_state(model.graph, state);
  std::vector<Batch> batches;
  for (const Sizes& sizes : model.sizes) batches.emplace_back(model.graph, sizes);
  for (int round = 0; round < 3; ++round) {
    for (const Batch& batch : batches) {
      for (int i = 0; i < 6; ++i) program.train_step(state, batch.inputs);
      program.evaluate(state, batch.inputs);
      gpu::device(0).synchronize_all();
      memory.trim();  // what was recorded with these addresses must not run again
    }
  }
  gpu::device(0).synchronize_all();
  *gpu::device(0).fault_slot() = {.kind = FaultKind::label, .value = 7, .high = 3};
  bool raised = false;
  for (int i = 0; i < 3 && !raised; ++i) {
    try {
      program.train_step(state, batches.front().inputs);
    } catch (const IndexError&) {
      raised = true;
    }
  }
  check(raised, "a fault was not raised");
  for (int i = 0; i < 3; ++i) program.train_step(state, batches.front().inputs);
  gpu::device(0).synchronize_all();
}

// What a recording refuses leaves the device as it was.
void interrupt_recordings() {
  Device& device = gpu::device(0);
  const std::shared_ptr<Block> block = device.tensor(1024, nullptr);
  bool thrown = false;
  try {
    device.record([&](void* stream) {
      device.zero(block->data(), 1024, stream);
      throw Error("in the middle");
    });
  } catch (const Error&) {
    thrown = true;
  }
  check(thrown, "an error was lost");
  const std::shared_ptr<Recording> recording =
      device.record([&](void* stream) { device.zero(block->data(), 1024, stream); });
  check(recording != nullptr && recording->num_launches() == 1, "one node is recorded");
  recording->launch(nullptr);
  check(!device.is_recorded_elsewhere(nullptr), "nothing is recorded");
  device.synchronize(nullptr);
}

template <class Work>
bool tell(const std::string& name, const Work& work) {
  try {
    work();
    std::printf("{\"done\": \"%s\"}\n", name.c_str());
    return true;
  } catch (const std::exception& error) {
    std::printf("{\"failed\": \"%s\"}\n", name.c_str());
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
    return false;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  bool right = tell("interrupted recordings", interrupt_recordings);
  std::vector<Model> models;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    if (entry.path().extension() == ".graph") models.push_back(read_model(entry.path()));
  }
  std::ranges::sort(models, {}, &Model::name);
  int turn = 0;
  for (const Model& model : models) {
    const char* const steps[] = {"SgdStep", "AdamStep", "LambStep"};
    const std::string step = steps[turn % 3];
    const int64_t accumulation = 1 + turn++ % 2;
    right = tell(model.name + " by " + step, [&] { train(model, step, accumulation); }) && right;
  }
  right = tell("two threads",
               [&] {
                 std::vector<std::thread> threads;
                 std::vector<std::exception_ptr> errors(2);
                 CachedMemory memory;
                 for (size_t i = 0; i < 2 && i < models.size(); ++i) {
                   threads.emplace_back([&, i] {
                     try {
                       const TrainingProgram program(models[i].graph,
                                                     options_of(models[i].graph, "AdamStep", 1),
                                                     gpu::kernels(0));
                       TrainingState state;
                       fill_state(models[i].graph, state);
                       const Batch batch(models[i].graph, models[i].sizes.front());
                       for (int k = 0; k < 12; ++k) program.train_step(state, batch.inputs);
                     } catch (...) {
                       errors[i] = std::current_exception();
                     }
                   });
                 }
                 for (std::thread& thread : threads) thread.join();
                 for (const std::exception_ptr& error : errors) {
                   if (error) std::rethrow_exception(error);
                 }
               }) &&
          right;
  const auto left = gpu::device(0).kept_recordings().counts();
  std::printf("{\"recordings left\": %zu}\n", left.recordings);
  return right && !models.empty() && left.recordings == 0 ? 0 : 1;
}
