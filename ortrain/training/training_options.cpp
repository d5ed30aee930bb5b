// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/training_options.h"

#include <charconv>

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

std::string step_number_target(size_t step_class) {
  return step_class == 0 ? kStepNumber : str(kStepNumber, ":", step_class);
}

std::optional<size_t> step_class_of(std::string_view target) {
  const std::string_view first = kStepNumber;
  if (!target.starts_with(first)) return std::nullopt;
  target.remove_prefix(first.size());
  if (target.empty()) return 0;
  size_t number = 0;
  const char* end = target.data() + target.size();
  if (target[0] != ':' || std::from_chars(target.data() + 1, end, number).ptr != end) {
    return std::nullopt;
  }
  return number;
}

}  // namespace ortrain
