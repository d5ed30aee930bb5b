// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// ortrain_fuzz_seeds <folder>: writes inputs to begin with, a folder per target. Graphs come from
// the operators' own cases, so that each operator and each of its kernels is in one.
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>

#include "fuzz/byte_source.h"
#include "fuzz/targets.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/onnx_io.h"
#include "ortrain/ir/text.h"
#include "ortrain/testing/harness.h"
#include "ortrain/training/artifacts.h"
#include "ortrain/training/checkpoint.h"

namespace ortrain::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostSeedBytes = 4096;

void write(const fs::path& path, const std::string& content) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << content;
}

std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string part(const std::string& content) {
  const auto length = static_cast<uint32_t>(content.size());
  return std::string(reinterpret_cast<const char*>(&length), 4) + content;
}

// Floats are inputs that are trained, all else is constant.
Graph graph_of(const testing::OpCase& op_case, DType type) {
  Graph graph;
  graph.name = "g";
  GraphBuilder builder(graph);
  std::vector<ValueId> values;
  for (const TensorData& input : testing::make_inputs(op_case, type)) {
    if (!input.defined()) {
      values.push_back(kNoValue);
    } else if (is_float(input.dtype())) {
      values.push_back(graph.add_input({.requires_grad = true}, str("x", values.size()),
                                       input.dtype(), to_shape(input.dims())));
    } else {
      values.push_back(graph.add_constant(input));
    }
  }
  const size_t colons = op_case.op.find("::");
  const bool own = colons != std::string::npos;
  const std::vector<ValueId> outputs = builder.node(
      own ? op_case.op.substr(0, colons) : "", own ? op_case.op.substr(colons + 2) : op_case.op,
      values, op_case.attributes, std::vector<bool>(op_case.outputs, true));
  for (size_t i = 0; i < outputs.size(); ++i) {
    graph.add_output({.value = outputs[i], .name = str("y", i)});
  }
  return graph;
}

void write_cases(const fs::path& folder) {
  for (const testing::OpCase& op_case : testing::all_cases().all()) {
    std::string name = testing::case_name(op_case);
    for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
    const std::vector<DType> types = testing::types_under_test(op_case);
    if (types.empty()) continue;
    try {
      const Graph graph = graph_of(op_case, types[0]);
      const std::string text = print_graph(graph, {.types = false});
      const std::string bytes = to_onnx_bytes(graph);
      if (text.size() <= kMostSeedBytes) write(folder / "text" / name, text);
      if (bytes.size() <= kMostSeedBytes) write(folder / "onnx" / name, bytes);
    } catch (const Error&) {
      continue;  // a case that is to be refused
    }
  }
}

constexpr const char* kModel =
    "graph g (float32[b, 3] x, float32[3, 2] w [parameter grad], float32[2] c [parameter grad],\n"
    "         float32[2] mean [buffer]) => (loss, n [buffer_update mean]) {\n"
    "  h = Gemm(x, w, c)\n  r = Relu(h)\n  d = Dropout(r, float32 0.5, bool true)\n"
    "  m = ReduceMean<keepdims = 0>(d, int64[1] {0})\n  n = Add(mean, m)\n"
    "  loss = ReduceSum<keepdims = 0>(d)\n}";

void write_checkpoints(const fs::path& folder) {
  const fs::path scratch = folder / "scratch";
  for (const char* step : {"SgdStep", "AdamStep", "LambStep", "AdagradStep"}) {
    const Graph model = parse_graph(kModel);
    TrainingOptions options{.loss = "loss"};
    options.optimizer.step = step;
    if (std::string(step) == "LambStep") options.optimizer.max_norm = 1;
    const std::map<std::string, TensorData> values{
        {"w", TensorData::from_values(DType::f32, {3, 2}, std::vector<float>{1, 2, 3, 4, 5, 6})},
        {"c", TensorData::from_values(DType::f32, {2}, std::vector<float>{1, -1})},
        {"mean", TensorData::from_values(DType::f32, {2}, std::vector<float>{0, 0})}};
    write_artifacts(scratch, model, values, options, 0.1);
    LoadedArtifacts loaded = load_artifacts(scratch, cpu_kernels());
    const std::vector<float> rows{1, 2, 3, 4, 5, 6};
    const InputTensor input{{DType::f32, {2, 3}}, rows.data()};
    loaded.program->add_gradients(*loaded.state, std::span(&input, 1));
    loaded.program->optimizer_step(*loaded.state);
    const fs::path saved =
        save_checkpoint(scratch / kCheckpointFolder, *loaded.state,
                        {{"epoch", int64_t{3}}, {"rate", 0.5}, {"name", std::string("run")}});
    const std::string parts = part(read(saved / "manifest.json")) +
                              part(read(saved / "parameters.safetensors")) +
                              part(read(saved / "optimizer.safetensors"));
    const fs::path to = folder / "checkpoint";
    write(to / str("sealed_", step), "C" + parts);
    write(to / str("artifacts_", step), "A" + part(read(scratch / kTrainingModel)) +
                                            part(read(scratch / kEvaluationModel)) +
                                            part(read(scratch / kOptimizerModel)) + parts);
    write(to / str("tensors_", step), "s" + read(saved / "optimizer.safetensors"));
    if (std::string(step) == "AdamStep") write(to / "whole", "c" + parts);
    fs::remove_all(scratch);
  }
}

void write_drawn(const fs::path& folder) {
  for (const char* target : {"extension", "sizes"}) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
      Numbers numbers(seed);
      std::string bytes;
      for (size_t i = 0; i < 16 + 16 * seed; ++i) bytes += static_cast<char>(numbers.next());
      write(folder / target / str("drawn_", seed), bytes);
    }
  }
}

}  // namespace
}  // namespace ortrain::fuzz

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: ortrain_fuzz_seeds <folder>\n";
    return 2;
  }
  ortrain::fuzz::write_cases(argv[1]);
  ortrain::fuzz::write_checkpoints(argv[1]);
  ortrain::fuzz::write_drawn(argv[1]);
  return 0;
}
