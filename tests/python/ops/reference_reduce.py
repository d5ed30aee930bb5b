# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Reduction operators as PyTorch computes them."""

from __future__ import annotations

import numpy as np
import torch

from tests.python.ops.registry import reference


@reference("ortrain::ReduceProdGrad")
def reduce_prod_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return the gradient of torch.prod over each axis in turn."""
    dy, data = inputs
    x = torch.from_numpy(data.astype(np.float64)).requires_grad_()
    y = x
    for axis in attrs["axes"]:
        y = y.prod(axis, keepdim=True)
    y.backward(torch.from_numpy(dy.astype(np.float64)))
    return [x.grad.numpy().astype(data.dtype)]


def reduced_axes(inputs: list[np.ndarray | None], attrs: dict) -> list[int]:
    """Return the axes that a reduction of ONNX means."""
    axes = [int(a) for a in inputs[1]] if len(inputs) > 1 and inputs[1] is not None else []
    if axes or attrs.get("noop_with_empty_axes", 0):
        return axes
    return list(range(inputs[0].ndim))


@reference("ortrain::WideReduceSum")
def wide_reduce_sum(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return the sum in float64."""
    axes = tuple(reduced_axes(inputs, attrs))
    keepdims = bool(attrs.get("keepdims", 1))
    return [np.sum(inputs[0], axis=axes, keepdims=keepdims, dtype=np.float64)]


@reference("ReduceLogSum")
def reduce_log_sum(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return log of the sum, cut to the integer for integers."""
    axes = tuple(reduced_axes(inputs, attrs))
    keepdims = bool(attrs.get("keepdims", 1))
    total = np.sum(inputs[0], axis=axes, keepdims=keepdims, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return [np.log(total).astype(inputs[0].dtype)]


@reference("ReduceLogSumExp")
def reduce_log_sum_exp(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return torch.logsumexp."""
    axes = reduced_axes(inputs, attrs)
    x = torch.from_numpy(np.asarray(inputs[0]))
    if not axes:
        return [x.numpy()]
    return [torch.logsumexp(x, axes, keepdim=bool(attrs.get("keepdims", 1))).numpy()]
