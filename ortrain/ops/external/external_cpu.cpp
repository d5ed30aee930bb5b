// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/runtime/external_functions.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

std::string key_of(const NodeSpec& spec) { return spec.attrs().string_("callable"); }

std::optional<std::string> why_not(const NodeSpec& spec) {
  if (ExternalFunctions::instance().find(key_of(spec)) != nullptr) return std::nullopt;
  return str("this process has no external function '", key_of(spec), "'");
}

std::vector<ExternalTensor> inputs_of(const NodeSpec& spec, size_t first) {
  std::vector<ExternalTensor> result;
  for (size_t i = first; i < spec.num_inputs(); ++i) {
    result.push_back({.spec = spec.has_input(i) ? spec.input(i) : TensorSpec{}});
  }
  return result;
}

std::vector<ExternalTensor> outputs_of(const NodeSpec& spec, size_t first) {
  std::vector<ExternalTensor> result;
  for (size_t i = first; i < spec.num_outputs(); ++i) {
    result.push_back({.spec = spec.has_output(i) ? spec.output(i) : TensorSpec{}});
  }
  return result;
}

RunState& state_of(const KernelArgs& args) {
  check(args.run != nullptr, "an external function keeps something outside of a run");
  return *args.run;
}

KernelFn make_external(NodeSpec& spec) {
  const size_t results = spec.attrs().ints("types").size();
  return [function = ExternalFunctions::instance().find(key_of(spec)),
          site = spec.attrs().int_("site"), keep = spec.has_output(results),
          tracked = spec.attrs().ints("tracked"), results, in = inputs_of(spec, results),
          out = outputs_of(spec, 0)](const KernelArgs& args) {
    std::vector<ExternalTensor> operands = in;
    std::vector<ExternalTensor> made = out;
    for (size_t i = 0; i < operands.size(); ++i) {
      operands[i].data = const_cast<void*>(args.in[results + i]);  // read only
    }
    for (size_t i = 0; i < made.size(); ++i) made[i].data = args.out[i];
    if (keep) made.pop_back();  // the token
    std::shared_ptr<void> kept = function->forward(operands, made, tracked);
    if (!keep) return;
    *args.output<int64_t>(results) = site;
    state_of(args).kept[site] = std::move(kept);
  };
}

KernelFn make_external_grad(NodeSpec& spec) {
  const std::vector<int64_t> wanted = spec.attrs().ints("operands");
  const size_t first = 1 + wanted.size();
  const std::vector<int64_t> results = spec.attrs().ints("results");
  return [function = ExternalFunctions::instance().find(key_of(spec)), wanted, results, first,
          in = inputs_of(spec, first), out = outputs_of(spec, 0)](const KernelArgs& args) {
    std::vector<ExternalTensor> incoming = in;
    std::vector<ExternalTensor> made = out;
    for (size_t i = 0; i < incoming.size(); ++i) {
      incoming[i].data = const_cast<void*>(args.in[first + i]);  // read only
    }
    for (size_t i = 0; i < made.size(); ++i) made[i].data = args.out[i];
    const auto& kept = state_of(args).kept;
    const auto found = kept.find(*args.input<int64_t>(0));
    check(found != kept.end(), "the forward of an external function kept nothing");
    function->backward(found->second.get(), results, incoming, wanted, made);
  };
}

}  // namespace

void register_external(KernelRegistry& registry) {
  registry.add("ortrain::External", {{.name = "host", .why_not = why_not, .make = make_external}});
  registry.add("ortrain::ExternalGrad",
               {{.name = "host", .why_not = why_not, .make = make_external_grad}});
}

}  // namespace ortrain::cpu
