// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ortrain/base/byte_count.h"
#include "ortrain/runtime/kernel.h"

namespace ortrain {

// What is decided for every kernel alike, from the sizes of a node.

ByteCount bytes_of_outputs(const NodeSpec& spec);

// No result has elements. What is given integers may have to refuse them, as indices, so that it
// has something to do.
bool has_nothing_to_do(const NodeSpec& spec);

// An input or result has no elements, though its extents before the first 0 multiply to more than
// 2^30, or all others to more than 2^32. Kernels go along axes, some of them along these: for
// hours, to find nothing.
bool has_long_empty_axes(const NodeSpec& spec);

// Throws OutOfMemoryError where inputs and results take more bytes than `limit`, and
// UnsupportedError where one without elements has such axes.
void check_memory(const NodeSpec& spec, uint64_t limit);
void check_empty_axes(const NodeSpec& spec);

}  // namespace ortrain
