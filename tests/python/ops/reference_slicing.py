# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Slicing operators: ours, and Pad with the negative pads that ONNX's reference lacks."""

from __future__ import annotations

import numpy as np
import torch

from tests.python.ops.registry import reference


@reference("ortrain::SliceGrad")
def slice_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return zeros with the gradient at the places that the slice reads."""
    dy, shape, starts, ends = inputs[:4]
    axes = inputs[4] if len(inputs) > 4 and inputs[4] is not None else range(len(starts))
    steps = inputs[5] if len(inputs) > 5 and inputs[5] is not None else [1] * len(starts)
    dx = np.zeros(shape, dy.dtype)
    box = [slice(None)] * dx.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        box[axis] = slice(int(start), int(end), int(step))
    dx[tuple(box)] = dy
    return [dx]


@reference("ortrain::PadGrad")
def pad_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return the gradient of NumPy's padding: its index map, transposed."""
    dy, shape, pads = inputs[:3]
    rank = len(shape)
    axes = [int(a) for a in inputs[3]] if len(inputs) > 3 else list(range(rank))
    widths = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        widths[axis] = (int(pads[i]), int(pads[len(axes) + i]))
    places = np.arange(np.prod(shape)).reshape(shape)
    source = np.pad(places, widths, mode=attrs.get("mode", "reflect")).reshape(-1)
    dx = torch.zeros(places.size, dtype=torch.float64)
    dx.index_add_(0, torch.from_numpy(source), torch.from_numpy(dy.astype(np.float64)).reshape(-1))
    return [dx.reshape(tuple(shape)).numpy().astype(dy.dtype)]


@reference("Pad")
def pad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Pad what grows with NumPy, then cut off what shrinks."""
    data, pads = inputs[:2]
    value = inputs[2] if len(inputs) > 2 and inputs[2] is not None else 0
    axes = [int(a) for a in inputs[3]] if len(inputs) > 3 else list(range(data.ndim))
    widths = [(0, 0)] * data.ndim
    for i, axis in enumerate(axes):
        widths[axis] = (int(pads[i]), int(pads[len(axes) + i]))
    if data.ndim == 0:
        return [data]
    mode = attrs.get("mode", "constant")
    extra = {"constant_values": np.asarray(value).item()} if mode == "constant" else {}
    grown = np.pad(data, [(max(b, 0), max(e, 0)) for b, e in widths], mode=mode, **extra)
    kept = tuple(
        slice(max(-b, 0), n - max(-e, 0)) for (b, e), n in zip(widths, grown.shape, strict=True)
    )
    return [grown[kept]]
