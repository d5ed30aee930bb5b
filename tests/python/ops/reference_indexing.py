# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Indexing operators as PyTorch computes them."""

from __future__ import annotations

import numpy as np
import torch

from tests.python.ops.registry import reference


@reference("ortrain::GatherGrad")
def gather_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return the gradient that index_select gives."""
    dy, indices, shape = inputs
    axis = attrs.get("axis", 0)
    extent = int(shape[axis])
    flat = torch.from_numpy(indices.astype(np.int64)).reshape(-1) % extent
    dx = torch.zeros([int(n) for n in shape], dtype=torch.float64)
    outer = list(dx.shape[:axis])
    inner = list(dx.shape[axis + 1 :])
    grad = torch.from_numpy(dy.astype(np.float64)).reshape([*outer, flat.numel(), *inner])
    return [dx.index_add(axis, flat, grad).numpy().astype(dy.dtype)]


def index_nd(x: torch.Tensor, indices: np.ndarray, batch_dims: int) -> torch.Tensor:
    """Index ``x`` with tuples, the leading axes being those of a batch."""
    tuples = torch.from_numpy(indices)
    batch = list(x.shape[:batch_dims])
    grids = torch.meshgrid(*[torch.arange(n) for n in batch], indexing="ij") if batch else []
    extra = tuples.dim() - 1 - batch_dims
    index = [grid.reshape([*batch, *[1] * extra]) for grid in grids]
    index += list(tuples.unbind(-1))
    return x[tuple(index)] if index else x.expand(*tuples.shape[:-1], *x.shape)


@reference("GatherND")
def gather_nd(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return what indexing with tensors gives."""
    data, indices = inputs
    return [index_nd(torch.from_numpy(data), indices, attrs.get("batch_dims", 0)).numpy()]


@reference("GatherElements")
def gather_elements(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return torch.gather, negative indices resolved."""
    data, indices = inputs
    axis = attrs.get("axis", 0)
    positive = torch.from_numpy(indices.astype(np.int64)) % data.shape[axis]
    return [torch.gather(torch.from_numpy(data), axis, positive).numpy()]


@reference("ortrain::GatherNDGrad")
def gather_nd_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return the gradient that indexing with tensors gives."""
    dy, indices, shape = inputs
    x = torch.zeros([int(n) for n in shape], dtype=torch.float64, requires_grad=True)
    y = index_nd(x, indices, attrs.get("batch_dims", 0))
    y.backward(torch.from_numpy(dy.astype(np.float64)))
    return [x.grad.numpy().astype(dy.dtype)]


@reference("ortrain::BinCount")
def bin_count(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return torch.histc."""
    x = torch.from_numpy(inputs[0])
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    low, high = attrs.get("min", 0.0), attrs.get("max", 0.0)
    counts = torch.histc(wide, bins=attrs.get("bins", 100), min=low, max=high)
    return [counts.to(x.dtype).numpy()]


@reference("ortrain::CheckIndices")
def check_indices(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    return [inputs[0]]
