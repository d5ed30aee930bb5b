// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/device_code.h"
#include "ortrain/runtime/fault.h"

namespace ortrain::gpu {

// Whether a fault is recorded in the slot, which may be null. The slot is memory of the host: for
// one thread of a launch.
ORTRAIN_DEVICE bool has_fault(const Fault* slot) {
  return slot != nullptr && *reinterpret_cast<const volatile int*>(&slot->kind) != 0;
}

}  // namespace ortrain::gpu
