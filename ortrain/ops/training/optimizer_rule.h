// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/base/optimizer_rules.h"
#include "ortrain/ir/node_spec.h"

namespace ortrain::ops {

// What the attributes of an optimizer's node say; those that its operator does not have stay as
// they are. Throws InvalidModelError for an unknown decay_mode.
StepRule optimizer_rule(const NodeSpec& spec);

}  // namespace ortrain::ops
