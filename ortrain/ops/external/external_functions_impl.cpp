// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ops/external/external_kernels.h"
#include "ortrain/runtime/external_functions.h"

namespace ortrain::ops {
namespace {

std::string key_of(const NodeSpec& spec) { return spec.attrs().string_("callable"); }

std::optional<std::string> why_not(const NodeSpec& spec) {
  if (ExternalFunctions::instance().find(key_of(spec)) != nullptr) return std::nullopt;
  return str("this process has no external function '", key_of(spec), "'");
}

std::vector<ExternalTensor> inputs_of(const NodeSpec& spec, size_t first, const Device& device) {
  std::vector<ExternalTensor> result;
  for (size_t i = first; i < spec.num_inputs(); ++i) {
    result.push_back({.spec = spec.has_input(i) ? spec.input(i) : TensorSpec{}, .device = &device});
  }
  return result;
}

std::vector<ExternalTensor> outputs_of(const NodeSpec& spec, size_t first, const Device& device) {
  std::vector<ExternalTensor> result;
  for (size_t i = first; i < spec.num_outputs(); ++i) {
    result.push_back(
        {.spec = spec.has_output(i) ? spec.output(i) : TensorSpec{}, .device = &device});
  }
  return result;
}

RunState& state_of(const KernelArgs& args) {
  check(args.run != nullptr, "an external function keeps something outside of a run");
  return *args.run;
}

// The token links a function's backward to its forward by where it lies: nothing reads its value,
// which may be on a device.
int64_t token_of(const void* place) { return reinterpret_cast<int64_t>(place); }

KernelFn make_external(NodeSpec& spec, const Device& device) {
  const size_t results = spec.attrs().ints("types").size();
  return
      [function = ExternalFunctions::instance().find(key_of(spec)), keep = spec.has_output(results),
       tracked = spec.attrs().ints("tracked"), results, in = inputs_of(spec, results, device),
       out = outputs_of(spec, 0, device)](const KernelArgs& args) {
        std::vector<ExternalTensor> operands = in;
        std::vector<ExternalTensor> made = out;
        for (size_t i = 0; i < operands.size(); ++i) {
          operands[i].data = const_cast<void*>(args.in[results + i]);  // read only
        }
        for (size_t i = 0; i < made.size(); ++i) made[i].data = args.out[i];
        if (keep) made.pop_back();  // the token
        std::shared_ptr<void> kept = function->forward(operands, made, tracked);
        if (!keep) return;
        state_of(args).kept[token_of(args.out[results])] = std::move(kept);
      };
}

KernelFn make_external_grad(NodeSpec& spec, const Device& device) {
  const std::vector<int64_t> wanted = spec.attrs().ints("operands");
  const size_t first = 1 + wanted.size();
  const std::vector<int64_t> results = spec.attrs().ints("results");
  return [function = ExternalFunctions::instance().find(key_of(spec)), wanted, results, first,
          in = inputs_of(spec, first, device),
          out = outputs_of(spec, 0, device)](const KernelArgs& args) {
    std::vector<ExternalTensor> incoming = in;
    std::vector<ExternalTensor> made = out;
    for (size_t i = 0; i < incoming.size(); ++i) {
      incoming[i].data = const_cast<void*>(args.in[first + i]);  // read only
    }
    for (size_t i = 0; i < made.size(); ++i) made[i].data = args.out[i];
    const auto& kept = state_of(args).kept;
    const auto found = kept.find(token_of(args.in[0]));
    check(found != kept.end(), "the forward of an external function kept nothing");
    function->backward(found->second.get(), results, incoming, wanted, made);
  };
}

}  // namespace

void register_external_kernels(KernelRegistry& registry) {
  const auto kernel = [&](KernelFn (*make)(NodeSpec&, const Device&)) {
    Kernel made{.name = "external", .why_not = why_not};
    made.make = [make, device = &registry.device()](NodeSpec& spec) { return make(spec, *device); };
    made.waits = true;
    return made;
  };
  registry.add("ortrain::External", {kernel(make_external)});
  registry.add("ortrain::ExternalGrad", {kernel(make_external_grad)});
}

}  // namespace ortrain::ops
