// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/op_def.h"

namespace ortrain {
namespace {

const FormalValue* formal_at(const std::vector<FormalValue>& formals, size_t index) {
  if (index < formals.size()) return &formals[index];
  if (!formals.empty() && formals.back().arity == Arity::variadic) return &formals.back();
  return nullptr;
}

}  // namespace

const FormalAttribute* OpDef::find_attribute(const std::string& attribute) const {
  for (const FormalAttribute& formal : attrs) {
    if (formal.name == attribute) return &formal;
  }
  return nullptr;
}

const FormalValue* OpDef::formal_input(size_t index) const { return formal_at(inputs, index); }
const FormalValue* OpDef::formal_output(size_t index) const { return formal_at(outputs, index); }

}  // namespace ortrain
