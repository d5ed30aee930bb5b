// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace ortrain {

// How many bytes a serialized model would take in memory, parsed and as a graph; a bit more rather
// than less. Reads the bytes once and allocates nothing. nullopt when they are no model. A two-byte
// empty node takes a thousand bytes once it is parsed, so this is asked first.
std::optional<uint64_t> onnx_memory(std::span<const std::byte> model);

}  // namespace ortrain
