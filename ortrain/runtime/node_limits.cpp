// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/node_limits.h"

#include <functional>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

constexpr int64_t kLongestLoopOverNothing = int64_t{1} << 30;
// Behind an axis without elements most kernels go nowhere: a batch without rows may have long rows.
constexpr int64_t kMostBehindNothing = int64_t{1} << 32;

bool is_long_and_empty(const TensorSpec& spec) {
  if (spec.numel() > 0) return false;
  int64_t before = 1, all = 1;  // of a value's extents, which check_extents has seen
  bool is_before = true;
  for (int64_t extent : spec.dims) {
    is_before = is_before && extent != 0;
    all *= extent == 0 ? 1 : extent;
    if (is_before) before *= extent;
  }
  return before > kLongestLoopOverNothing || all > kMostBehindNothing;
}

const TensorSpec* find_value(const NodeSpec& spec,
                             const std::function<bool(const TensorSpec&)>& holds) {
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    if (spec.has_input(i) && holds(spec.input(i))) return &spec.input(i);
  }
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    if (spec.has_output(i) && holds(spec.output(i))) return &spec.output(i);
  }
  return nullptr;
}

}  // namespace

ByteCount bytes_of_outputs(const NodeSpec& spec) {
  ByteCount bytes;
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    if (spec.has_output(i)) bytes += bytes_of<char>(spec.output(i).bytes());
  }
  return bytes;
}

bool has_nothing_to_do(const NodeSpec& spec) {
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    if (spec.has_output(i) && spec.output(i).numel() > 0) return false;
  }
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    if (spec.has_input(i) && !is_float(spec.input(i).dtype) && spec.input(i).numel() > 0) {
      return false;
    }
  }
  return true;
}

bool has_long_empty_axes(const NodeSpec& spec) {
  return find_value(spec, is_long_and_empty) != nullptr;
}

void check_memory(const NodeSpec& spec, uint64_t limit) {
  ByteCount bytes = bytes_of_outputs(spec);
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    if (spec.has_input(i)) bytes += bytes_of<char>(spec.input(i).bytes());
  }
  if (bytes.value() <= limit) return;
  throw OutOfMemoryError(str(spec.context(), "its inputs and results take ", bytes.value(),
                             " bytes, ", limit, " may be taken"));
}

void check_empty_axes(const NodeSpec& spec) {
  if (const TensorSpec* value = find_value(spec, is_long_and_empty)) {
    throw UnsupportedError(str(spec.context(), tensor_spec_str(*value),
                               " has no elements, but axes too long to go along"));
  }
}

}  // namespace ortrain
