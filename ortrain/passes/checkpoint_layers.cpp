// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/checkpoint_layers.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace ortrain {
namespace {

enum Kind : unsigned { kNone = 0, kAttention = 1, kNormalization = 2, kActivation = 4 };
constexpr unsigned kTransformer = kAttention | kNormalization | kActivation;

Kind kind_of(std::string_view op) {
  constexpr std::string_view attentions[] = {"Attention", "Softmax"};
  constexpr std::string_view activations[] = {
      "Elu",   "Erf",  "Gelu", "HardSwish", "Mish", "Relu",      "Sigmoid", "Silu",
      "Swish", "Tanh", "Selu", "Softplus",  "Celu", "LeakyRelu", "PRelu",   "QuickGelu"};
  if (std::ranges::find(attentions, op) != std::end(attentions)) return kAttention;
  if (std::ranges::find(activations, op) != std::end(activations)) return kActivation;
  // Older files write it out.
  return op.ends_with("Normalization") || op == "ReduceMean" ? kNormalization : kNone;
}

bool is_number(std::string_view part) {
  return !part.empty() && std::ranges::all_of(part, [](char c) { return c >= '0' && c <= '9'; });
}

// The paths of the numbered parts that a node lies in, the outermost first. What stands behind the
// last slash is the operator's.
std::vector<std::string_view> numbered_parts(std::string_view name) {
  std::vector<std::string_view> parts;
  const size_t end = name.rfind('/');
  if (end == std::string_view::npos) return parts;
  for (size_t begin = 0; begin <= end;) {
    const size_t next = std::min(name.find_first_of("./", begin), end);
    if (is_number(name.substr(begin, next - begin))) parts.push_back(name.substr(0, next));
    begin = next + 1;
  }
  return parts;
}

struct Part {
  unsigned kinds = kNone;
  bool has_layers = false;  // inside of it
  int number = 0;           // of its checkpoint
};

}  // namespace

int64_t checkpoint_layers(Graph& graph, int64_t count) {
  std::map<std::string, Part, std::less<>> parts;
  std::vector<std::string> in_order;
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    for (std::string_view path : numbered_parts(node.name)) {
      auto found = parts.find(path);
      if (found == parts.end()) {
        found = parts.emplace(path, Part{}).first;
        in_order.emplace_back(path);
      }
      found->second.kinds |= kind_of(node.op);
    }
  }
  for (const auto& [path, part] : parts) {
    if (part.kinds != kTransformer) continue;
    const std::string inside = path + '/';
    std::vector<std::string_view> around = numbered_parts(inside);
    around.pop_back();  // the part itself
    for (std::string_view outer : around) parts.find(outer)->second.has_layers = true;
  }
  std::erase_if(in_order, [&](const std::string& path) {
    const Part& part = parts.find(path)->second;
    return part.kinds != kTransformer || part.has_layers;
  });
  const auto layers = static_cast<int64_t>(in_order.size());
  const int64_t wanted = count > 0 ? std::min(count, layers) : std::max<int64_t>(layers - 1, 0);
  int number = 0;
  for (NodeId id : graph.order()) number = std::max(number, graph.node(id).checkpoint);
  for (int64_t i = 0; i < wanted; ++i) {
    parts.find(in_order[static_cast<size_t>(i)])->second.number = ++number;
  }
  for (NodeId id : graph.order()) {
    Node& node = graph.node(id);
    if (node.phase != Phase::forward || node.checkpoint != 0) continue;
    for (std::string_view path : numbered_parts(node.name)) {
      node.checkpoint = std::max(node.checkpoint, parts.find(path)->second.number);
    }
  }
  return wanted;
}

}  // namespace ortrain
