// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/checkpoint_layers.h"

#include <gtest/gtest.h>

#include <map>

#include "ortrain/ir/text.h"

namespace ortrain {
namespace {

// A layer by its path: from `in` to `out`.
std::string layer(const std::string& path, const std::string& in, const std::string& out) {
  const std::string a = out + "_a";
  const std::string b = out + "_b";
  return "  " + a + " = Softmax <axis = -1> (" + in + ") @" + path + ".attention/Softmax\n  " + b +
         " = Gelu (" + a + ") @" + path + ".mlp.0/Gelu\n  " + out + " = LayerNormalization (" + b +
         ", w) @" + path + ".norm/LayerNormalization\n";
}

Graph graph_of(const std::string& body) {
  return parse_graph("graph g (float32[8, 4] x, float32[4] w) => (y) {\n" + body + "}\n");
}

std::map<std::string, int> checkpoints(const Graph& graph) {
  std::map<std::string, int> found;
  for (NodeId id : graph.order()) found[graph.node(id).name] = graph.node(id).checkpoint;
  return found;
}

Graph three_layers() {
  return graph_of("  e = Relu (x) @embed.0/Relu\n" + layer("enc.layer.0", "e", "a") +
                  layer("enc.layer.1", "a", "b") + layer("enc.layer.2", "b", "c") +
                  "  y = Tanh (c) @pool/Tanh\n");
}

TEST(CheckpointLayers, AllButTheLast) {
  Graph graph = three_layers();
  EXPECT_EQ(checkpoint_layers(graph, 0), 2);
  auto found = checkpoints(graph);
  EXPECT_EQ(found["enc.layer.0.attention/Softmax"], 1);
  EXPECT_EQ(found["enc.layer.0.mlp.0/Gelu"], 1);
  EXPECT_EQ(found["enc.layer.1.norm/LayerNormalization"], 2);
  EXPECT_EQ(found["enc.layer.2.mlp.0/Gelu"], 0);
  EXPECT_EQ(found["embed.0/Relu"], 0) << "a part of a list that is no layer";
  EXPECT_EQ(found["pool/Tanh"], 0);
}

TEST(CheckpointLayers, TheFirstOnes) {
  Graph graph = three_layers();
  EXPECT_EQ(checkpoint_layers(graph, 1), 1);
  auto found = checkpoints(graph);
  EXPECT_EQ(found["enc.layer.0.mlp.0/Gelu"], 1);
  EXPECT_EQ(found["enc.layer.1.mlp.0/Gelu"], 0);
  graph = three_layers();
  EXPECT_EQ(checkpoint_layers(graph, 9), 3);
  EXPECT_EQ(checkpoints(graph)["enc.layer.2.mlp.0/Gelu"], 3);
}

TEST(CheckpointLayers, OfStagesTheBlocksInside) {
  Graph graph =
      graph_of(layer("stages.0.blocks.0", "x", "a") + layer("stages.0.blocks.1", "a", "b") +
               layer("stages.1.blocks.0", "b", "y"));
  EXPECT_EQ(checkpoint_layers(graph, 0), 2);
  auto found = checkpoints(graph);
  EXPECT_EQ(found["stages.0.blocks.0.mlp.0/Gelu"], 1);
  EXPECT_EQ(found["stages.0.blocks.1.mlp.0/Gelu"], 2);
  EXPECT_EQ(found["stages.1.blocks.0.mlp.0/Gelu"], 0);
}

TEST(CheckpointLayers, TenComesBehindNine) {
  std::string body;
  std::string before = "x";
  for (int i = 0; i < 11; ++i) {
    const std::string out = i == 10 ? "y" : "v" + std::to_string(i);
    body += layer("h." + std::to_string(i), before, out);
    before = out;
  }
  Graph graph = graph_of(body);
  EXPECT_EQ(checkpoint_layers(graph, 0), 10);
  auto found = checkpoints(graph);
  EXPECT_EQ(found["h.9.mlp.0/Gelu"], 10);
  EXPECT_EQ(found["h.10.mlp.0/Gelu"], 0);
}

TEST(CheckpointLayers, PathsWithSlashes) {
  Graph graph = graph_of(
      "  a = Softmax <axis = -1> (x) @/enc/layers.0/attn/Softmax\n"
      "  b = Relu (a) @/enc/layers.0/mlp/Relu\n"
      "  c = LayerNormalization (b, w) @/enc/layers.0/norm/LayerNormalization\n"
      "  y = Relu (c) @/enc/layers.1/mlp/Relu\n");
  EXPECT_EQ(checkpoint_layers(graph, 1), 1);
  auto found = checkpoints(graph);
  EXPECT_EQ(found["/enc/layers.0/attn/Softmax"], 1);
  EXPECT_EQ(found["/enc/layers.1/mlp/Relu"], 0);
}

TEST(CheckpointLayers, NothingWithoutPathsOrLayers) {
  Graph graph = graph_of("  a = Relu (x)\n  b = Softmax <axis = -1> (a) @a\n  y = Tanh (b) @b/\n");
  EXPECT_EQ(checkpoint_layers(graph, 0), 0);
  EXPECT_EQ(checkpoint_layers(graph, 3), 0);
  for (const auto& [name, number] : checkpoints(graph)) EXPECT_EQ(number, 0) << name;
}

TEST(CheckpointLayers, CheckpointsOfTheModelStay) {
  Graph graph = three_layers();
  for (NodeId id : graph.order()) {
    if (graph.node(id).name == "enc.layer.0.mlp.0/Gelu") graph.node(id).checkpoint = 5;
  }
  checkpoint_layers(graph, 0);
  auto found = checkpoints(graph);
  EXPECT_EQ(found["enc.layer.0.mlp.0/Gelu"], 5);
  EXPECT_EQ(found["enc.layer.0.attention/Softmax"], 6);
}

}  // namespace
}  // namespace ortrain
