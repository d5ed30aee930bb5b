// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ops/training/optimizer_rule.h"

namespace ortrain::ops {
namespace {

DecayMode decay_mode(const std::string& name) {
  if (name == "decoupled") return DecayMode::decoupled;
  if (name == "after") return DecayMode::after;
  if (name == "l2") return DecayMode::l2;
  throw InvalidModelError(str("decay_mode '", name, "' is none of decoupled, after, l2"));
}

}  // namespace

StepRule optimizer_rule(const NodeSpec& spec) {
  const AttributeReader attrs = spec.attrs();
  const auto has = [&](const char* name) { return spec.def().find_attribute(name) != nullptr; };
  const auto read = [&](const char* name, double& number) {
    if (has(name)) number = attrs.float_(name);
  };
  StepRule rule;
  read("beta1", rule.beta1);
  read("beta2", rule.beta2);
  read("epsilon", rule.epsilon);
  read("weight_decay", rule.weight_decay);
  read("momentum", rule.momentum);
  read("dampening", rule.dampening);
  read("ratio_min", rule.ratio_min);
  read("ratio_max", rule.ratio_max);
  read("rate_decay", rule.rate_decay);
  if (has("nesterov")) rule.nesterov = attrs.int_("nesterov") != 0;
  if (has("bias_correction")) rule.bias_correction = attrs.int_("bias_correction") != 0;
  if (has("decay_mode")) rule.decay_mode = decay_mode(attrs.string_("decay_mode"));
  return rule;
}

}  // namespace ortrain::ops
