// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>
#include <string_view>

#include "fuzz/answers.h"
#include "fuzz/byte_source.h"
#include "fuzz/exercise_graph.h"
#include "fuzz/targets.h"
#include "ortrain/ir/graph_compare.h"
#include "ortrain/ir/onnx_io.h"
#include "ortrain/ir/text.h"

namespace ortrain::fuzz {
namespace {

// What a reader has taken can be written, and read again as the same graph.
template <class Again>
void compare(const Graph& graph, const char* form, const Again& again) {
  std::string difference;
  try {
    difference = first_difference(graph, again());
  } catch (const Error& error) {
    difference = error.what();
  }
  require(difference.empty(), std::string(form) + " gives another graph: " + difference);
}

}  // namespace

void run_onnx(Bytes input) {
  const uint64_t seed = hash_bytes(input);
  LoadOptions options{.memory_limit = uint64_t{64} << 20};
  constexpr LoadOptions::Initializers kKinds[] = {LoadOptions::Initializers::constants,
                                                  LoadOptions::Initializers::parameters,
                                                  LoadOptions::Initializers::weights};
  options.initializers = kKinds[seed / 64 % 3];
  std::optional<OnnxModel> model;
  if (!accepted([&] { model = load_onnx_model_bytes(std::as_bytes(input), options); })) return;
  if (seed % 16 == 0) {
    compare(model->graph, "a file", [&] {
      const std::string bytes = to_onnx_bytes(model->graph);
      return load_onnx_bytes(std::as_bytes(std::span(bytes)));
    });
  }
  exercise_graph(model->graph, seed);
}

void run_text(Bytes input) {
  const uint64_t seed = hash_bytes(input);
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  std::optional<Graph> graph;
  if (!accepted([&] { graph = parse_graph(text); })) return;
  if (seed % 16 == 0) {
    compare(*graph, "the text", [&] { return parse_graph(print_graph(*graph)); });
  }
  exercise_graph(*graph, seed);
}

}  // namespace ortrain::fuzz
