# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Shape operators: ours, and those of ONNX whose own reference cannot do every case."""

from __future__ import annotations

import numpy as np
import torch

from tests.python.ops.registry import reference


@reference("ortrain::SumToShape")
def sum_to_shape(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return x summed to the given shape."""
    x, shape = inputs
    return [torch.from_numpy(x).sum_to_size([int(n) for n in shape]).numpy()]


@reference("Reshape")
def reshape(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Reshape; unlike NumPy, an extent of -1 is found beside an extent of 0 that is copied."""
    data, target = inputs
    extents = [int(n) for n in target]
    if not attrs.get("allowzero", 0):
        extents = [data.shape[i] if n == 0 else n for i, n in enumerate(extents)]
    if -1 in extents and data.shape.count(0) > extents.count(0):
        extents[extents.index(-1)] = 0
    elif -1 in extents:
        have = np.prod([n for n in data.shape if n > 0], dtype=np.int64)
        used = np.prod([n for n in extents if n > 0], dtype=np.int64)
        extents[extents.index(-1)] = int(have // used)
    return [data.reshape(extents)]


@reference("Flatten")
def flatten(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Merge the axes on both sides of one; extents of 0 too."""
    data = inputs[0]
    axis = attrs.get("axis", 1)
    axis += data.ndim if axis < 0 else 0
    rows = int(np.prod(data.shape[:axis], dtype=np.int64))
    return [data.reshape(rows, int(np.prod(data.shape[axis:], dtype=np.int64)))]


@reference("OneHot")
def one_hot(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Compare indices with the positions of the new axis; those out of range fit nowhere."""
    indices, depth, values = inputs
    extent = int(depth.reshape(-1)[0])
    axis = attrs.get("axis", -1)
    axis += indices.ndim + 1 if axis < 0 else 0
    wide = np.expand_dims(indices.astype(np.float64), axis)
    positions = np.arange(extent).reshape([-1 if k == axis else 1 for k in range(wide.ndim)])
    hot = (wide == positions) | ((wide < 0) & (wide + extent == positions))
    return [np.where(hot, values[1], values[0]).astype(values.dtype)]
