// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <span>
#include <string>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/extension/abi.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/node_spec.h"
#include "ortrain/ir/op_def.h"
#include "ortrain/runtime/kernel.h"

// One of the three is set: what the function of the library was called for.
struct OrtrainContext {
  ortrain::AttributeReader attributes;
  ortrain::InferContext* infer = nullptr;
  ortrain::GradContext* gradient = nullptr;
  ortrain::NodeSpec* spec = nullptr;
  std::vector<ortrain::Dim> dims = {};             // the expressions that it handed out
  std::deque<std::vector<int64_t>> contents = {};  // of inputs, likewise
};

// What one library defines, before any of it counts.
struct OrtrainRegistrar {
  struct Entry {
    ortrain::OpDef def;
    std::vector<ortrain::Kernel> kernels;
  };
  std::vector<Entry> entries;
};

namespace ortrain::extension {

// The functions that a library gets.
const OrtrainHost& host();

// To be called before a function of a library, so that an older error is not taken for its own.
void forget_last_error();

// Throws the error that the calling thread's last failed call left.
[[noreturn]] void throw_last_error();

// Remembers the exception in flight for `last_error`; returns 1, the status of a failure.
int32_t remember_error() noexcept;

// Runs `body`; returns 0, or 1 after it has thrown.
template <typename Body>
int32_t guarded(Body&& body) noexcept {
  try {
    body();
    return 0;
  } catch (...) {
    return remember_error();
  }
}

// What a library hands over may be null where it must not be: throws InvalidModelError naming it.
std::string required_text(const char* given, const char* what);
template <typename T>
std::span<T> required_list(T* given, size_t count, const char* what) {
  if (given == nullptr && count > 0) throw InvalidModelError(str("there is no list of ", what));
  return {given, given == nullptr ? 0 : count};
}

// The engine's definition of an operator of a library, and its kernel. Throws InvalidModelError.
OrtrainRegistrar::Entry entry_of(const OrtrainOperator& op);

}  // namespace ortrain::extension
