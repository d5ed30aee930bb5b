// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/training_options.h"

#include "ortrain/base/error.h"

namespace ortrain {

std::vector<std::string> optimizer_states(const std::string& step, const Attributes& attributes) {
  if (step == "SgdStep") {
    const auto found = attributes.find("momentum");
    const bool momentum = found != attributes.end() && std::get<double>(found->second) != 0.0;
    return momentum ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
  }
  if (step == "AdamStep" || step == "LambStep") return {"exp_avg", "exp_avg_sq"};
  if (step == "AdagradStep") return {"sum"};
  throw InvalidModelError(str("'", step, "' is none of SgdStep, AdamStep, LambStep, AdagradStep"));
}

std::string state_target(const std::string& parameter, const std::string& state) {
  return parameter + ":" + state;
}

}  // namespace ortrain
