// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// What tests ask of the simulated device beside gpu_device.h.
namespace ortrain::gpu::simulator {

// Copies from the host so far.
int64_t num_uploads();
// While it is on, the host finds no fault that kernels record, as if they had not run yet.
void fall_behind(bool on);

}  // namespace ortrain::gpu::simulator
