// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include "ortrain/ir/op_def.h"

namespace ortrain::python {

// Attributes of a node of `def` from a dict of numbers, strings, lists and tensors. Throws what
// nanobind throws for a value of another kind.
Attributes attributes_from(nanobind::handle given, const OpDef& def);

// A number, string, list, or a torch tensor of its own memory.
nanobind::object to_python(const Attribute& attribute);
nanobind::object to_python(const TensorData& tensor);

// The extents: an int each, symbolic ones as text.
nanobind::list shape_list(const Shape& shape);

}  // namespace ortrain::python
