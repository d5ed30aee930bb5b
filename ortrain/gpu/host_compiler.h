// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "ortrain/gpu/runtime_compiler.h"

namespace ortrain::gpu {

// Kernels for the simulator by a C++17 compiler of the host, which `command` names or finds in
// PATH.
SourceCompiler host_source_compiler(const std::string& command);

}  // namespace ortrain::gpu
