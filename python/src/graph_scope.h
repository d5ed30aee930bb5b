// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/graph_builder.h"

namespace ortrain::python {

// The graph that a Python function works on, while it works on it.
struct GraphScope {
  GraphBuilder* builder = nullptr;  // null: the function has returned

  // Throws InvalidModelError once the function has returned.
  GraphBuilder& get() const;
};

using ScopePtr = std::shared_ptr<GraphScope>;

// A value of that graph.
struct ScopedValue {
  ScopePtr scope;
  ValueId id = kNoValue;
};

// A node of that graph.
struct ScopedNode {
  ScopePtr scope;
  NodeId id = kNoNode;
};

// None for kNoValue.
nanobind::object value_object(const ScopePtr& scope, ValueId id);
// kNoValue for None; a number becomes a scalar of the type of `like`, where there is one. Throws
// InvalidModelError for a value of another graph.
ValueId value_from(const ScopePtr& scope, nanobind::handle object, ValueId like = kNoValue);

// Adds a node; its output, or a tuple of them where `outputs` is above 1.
nanobind::object add_node(const ScopePtr& scope, const std::string& op, nanobind::args inputs,
                          const std::string& domain, int outputs, nanobind::kwargs attributes);

void init_graph_scope(nanobind::module_& module);

}  // namespace ortrain::python
