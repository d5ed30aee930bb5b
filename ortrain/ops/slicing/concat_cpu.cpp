// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/strided_copy.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// Alignment that every tensor of the engine has.
constexpr int64_t kAlignment = 64;

KernelFn make_concat(NodeSpec& spec) {
  const Dims& dims = spec.output(0).dims;
  const size_t axis = static_cast<size_t>(normalize_axis(spec.attrs().int_("axis"), dims.size()));
  const Dims out = strides_of(dims);
  std::vector<StridedCopy> copies;
  int64_t start = 0;
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    const Dims& part = spec.input(i).dims;
    copies.emplace_back(size_of(spec.output(0).dtype), part, strides_of(part), out, 0,
                        start * out[axis]);
    start += part[axis];
  }
  return [copies = std::move(copies)](const KernelArgs& args) {
    for (size_t i = 0; i < copies.size(); ++i) copies[i].run(args.in[i], args.out[0]);
  };
}

// Where each part starts along the axis. Parts may follow the last output that is wanted.
std::vector<int64_t> split_starts(const NodeSpec& spec, size_t axis) {
  const int64_t extent = spec.input(0).dims[axis];
  std::vector<int64_t> starts;
  if (const std::optional<std::vector<int64_t>> sizes =
          spec.has_input(1) ? spec.constant_ints(1) : std::nullopt) {
    int64_t start = 0;
    for (size_t i = 0; i < spec.num_outputs(); ++i) {
      starts.push_back(start);
      start += (*sizes)[i];
    }
    return starts;
  }
  check(!spec.has_input(1), "input 'split' is known when a kernel is made");
  const int64_t parts = spec.attrs().optional_int("num_outputs")
                            .value_or(static_cast<int64_t>(spec.num_outputs()));
  const int64_t chunk = (extent + parts - 1) / parts;
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    starts.push_back(static_cast<int64_t>(i) * chunk);
  }
  return starts;
}

size_t split_axis(const NodeSpec& spec) {
  return static_cast<size_t>(
      normalize_axis(spec.attrs().int_("axis"), spec.input(0).dims.size()));
}

KernelFn make_split(NodeSpec& spec) {
  const size_t axis = split_axis(spec);
  const Dims in = strides_of(spec.input(0).dims);
  const std::vector<int64_t> starts = split_starts(spec, axis);
  std::vector<std::pair<size_t, StridedCopy>> copies;
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    if (!spec.has_output(i)) continue;
    const Dims& part = spec.output(i).dims;
    copies.emplace_back(i, StridedCopy(size_of(spec.input(0).dtype), part, in, strides_of(part),
                                       starts[i] * in[axis], 0));
  }
  return [copies = std::move(copies)](const KernelArgs& args) {
    for (const auto& [output, copy] : copies) copy.run(args.in[0], args.out[output]);
  };
}

// Along the first axis that counts, the parts lie one behind the other in the input.
std::optional<std::vector<int64_t>> split_view(const NodeSpec& spec) {
  const size_t axis = split_axis(spec);
  const Dims& dims = spec.input(0).dims;
  for (size_t k = 0; k < axis; ++k) {
    if (dims[k] != 1) return std::nullopt;
  }
  const int64_t slice =
      strides_of(dims)[axis] * static_cast<int64_t>(size_of(spec.input(0).dtype));
  std::vector<int64_t> offsets;
  for (int64_t start : split_starts(spec, axis)) {
    if (start * slice % kAlignment != 0) return std::nullopt;
    offsets.push_back(start * slice);
  }
  return offsets;
}

}  // namespace

void register_concat(KernelRegistry& registry);
void register_concat(KernelRegistry& registry) {
  registry.add("Concat", {{.name = "ref", .make = make_concat}});
  registry.add("Split",
               {{.name = "view", .view = split_view}, {.name = "ref", .make = make_split}});
}

}  // namespace ortrain::cpu
