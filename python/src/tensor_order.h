// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "ortrain/base/dim.h"
#include "python/src/tensor_exchange.h"

// In which order the elements of torch tensors lie in memory.
namespace ortrain::python {

Dims dims_of(const TensorView& view);
int64_t numel(const TensorView& view);
bool same_dims(const TensorView& a, const TensorView& b);

// Whether the elements lie without gaps and without overlap, in any order of the axes.
bool is_dense(const TensorView& view);

// Whether equal positions in memory hold equal elements, for a dense tensor and another of its
// dims.
bool same_order(const TensorView& dense, const TensorView& other);

// A dense copy of a tensor in the order of `like`, of the same dims; row-major where that is not
// dense.
nanobind::object copy_in_order(nanobind::handle tensor, const TensorView& like);

}  // namespace ortrain::python
