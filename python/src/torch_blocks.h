// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <span>
#include <vector>

#include "ortrain/ir/node_spec.h"
#include "ortrain/runtime/block_pool.h"
#include "python/src/dlpack_abi.h"

// Blocks that are the memory of torch tensors, so that what users get are tensors whose storage is
// PyTorch's own: Tensor.record_stream and the like reach its allocator, which they do not through
// DLPack.
namespace ortrain::python {

// One per spec, on the calling thread's current stream. Takes the interpreter's lock once for all,
// and when the last reference to a block is dropped. Throws OutOfMemoryError.
std::vector<std::shared_ptr<Block>> torch_blocks(dlpack::Device place,
                                                 std::span<const TensorSpec* const> specs);

// The tensor of a block, which `spec` describes; none for other blocks.
nanobind::object tensor_of(const std::shared_ptr<Block>& block, const TensorSpec& spec);

}  // namespace ortrain::python
