// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/standard_form.h"

#include <map>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/verifier.h"

namespace ortrain {

namespace {

// What an operator outside of the engine is called, which its own name does not say.
std::string outside_name(const Node& node) {
  const auto found = node.attributes.find("callable");
  if (found == node.attributes.end()) return "it ";
  const auto* const name = std::get_if<std::string>(&found->second);
  return name == nullptr ? "it " : str("'", *name, "', which runs in PyTorch, ");
}

}  // namespace

void to_standard_operators(Graph& graph) {
  const std::vector<NodeId> order = graph.order();
  std::vector<bool> needed;
  for (const std::vector<NodeId>& users : graph.users()) needed.push_back(!users.empty());
  for (const GraphOutput& output : graph.outputs())
    needed[static_cast<size_t>(output.value)] = true;
  for (NodeId id : order) {
    Node node = graph.node(id);
    if (node.domain != kOrtrainDomain) continue;
    const OpDef& def = op_registry().get(node.domain, node.op);
    if (!def.standard_form) {
      throw UnsupportedError(
          str(Graph::context(node), outside_name(node), "has no form in standard ONNX operators"));
    }
    for (ValueId& output : node.outputs) {
      // One that nobody reads needs no form.
      if (output != kNoValue && !needed[static_cast<size_t>(output)]) output = kNoValue;
    }
    const std::vector<ValueId> made = standard_form_of(graph, def, node);
    for (size_t i = 0; i < made.size(); ++i) {
      if (made[i] != kNoValue) graph.replace_uses(node.outputs[i], made[i]);
    }
  }
  graph.sort();
  graph.remove_dead_nodes();
  // Some readers refuse two nodes of one name.
  std::map<std::string, int> counts;
  for (NodeId id : graph.order()) {
    Node& node = graph.node(id);
    const std::string name = node.name.empty() ? node.op : node.name;
    node.name = name;
    while (counts[node.name]++ > 0) node.name = str(name, "_", counts[name]);
  }
  verify(graph);
}

}  // namespace ortrain
