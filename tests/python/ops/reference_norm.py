# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Layer, RMS and group normalisation as PyTorch and its autograd compute them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from tests.python.ops.registry import reference

Tensors = list[torch.Tensor | None]


def tensors(inputs: list[np.ndarray | None], count: int) -> Tensors:
    given = [None if x is None else torch.from_numpy(np.array(x)).double() for x in inputs]
    return given + [None] * (count - len(given))


def reshaped(parameter: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    return None if parameter is None else parameter.reshape(shape)


@reference("LayerNormalization")
def layer_norm(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, scale, bias = tensors(inputs, 3)
    axis, epsilon = attrs.get("axis", -1) % x.dim(), attrs.get("epsilon", 1e-5)
    shape = x.shape[axis:]
    y = F.layer_norm(x, shape, reshaped(scale, shape), reshaped(bias, shape), epsilon)
    axes = tuple(range(axis, x.dim()))
    if not x.numel():
        kept = x.shape[:axis] + (1,) * len(axes)
        return [y.numpy(), np.zeros(kept), np.zeros(kept)]
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    return [y.numpy(), mean.numpy(), torch.rsqrt(variance + epsilon).numpy()]


@reference("ortrain::LayerNormalizationGrad")
def layer_norm_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    # mean and inv_std are any numbers here, so autograd cannot stand in for the formula.
    dy, x, mean, inv_std, scale, bias = tensors(inputs, 6)
    axis = attrs.get("axis", -1) % x.dim()
    shape, axes, rows = x.shape[axis:], tuple(range(axis, x.dim())), tuple(range(axis))
    h = (x - mean) * inv_std
    g = dy if scale is None else dy * scale.reshape(shape)
    dx = inv_std * (g - g.mean(axes, keepdim=True) - h * (g * h).mean(axes, keepdim=True))
    dscale = (dy * h).sum(rows) if rows else dy * h
    dbias = dy.sum(rows) if rows else dy
    if scale is not None:
        dscale = dscale.reshape(scale.shape)
    if bias is not None:
        dbias = dbias.reshape(bias.shape)
    return [dx.numpy(), dscale.numpy(), dbias.numpy()]


def gradients(run: Callable[..., torch.Tensor], dy: torch.Tensor, *inputs: torch.Tensor) -> list:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return [g.numpy() for g in torch.autograd.grad(run(*leaves), leaves, dy)]


def rms(x: torch.Tensor, scale: torch.Tensor | None, attrs: dict) -> torch.Tensor:
    shape = x.shape[attrs.get("axis", -1) % x.dim() :]
    return F.rms_norm(x, shape, reshaped(scale, shape), attrs.get("epsilon", 1e-5))


@reference("RMSNormalization")
def rms_norm(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, scale = tensors(inputs, 2)
    return [rms(x, scale, attrs).numpy()]


@reference("ortrain::RMSNormalizationGrad")
def rms_norm_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    dy, x, scale = tensors(inputs, 3)
    if scale is None:
        scale = torch.ones(x.shape[attrs.get("axis", -1) % x.dim() :], dtype=x.dtype)
    return gradients(lambda a, b: rms(a, b, attrs), dy, x, scale)


def group(x: torch.Tensor, scale: object, bias: object, attrs: dict) -> torch.Tensor:
    return F.group_norm(x, attrs["num_groups"], scale, bias, attrs.get("epsilon", 1e-5))


@reference("GroupNormalization")
def group_norm(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, scale, bias = tensors(inputs, 3)
    if bias is None:
        bias = torch.zeros(x.shape[1], dtype=x.dtype)
    if not x.numel():
        return [x.numpy()]
    if x[0, : x.shape[1] // attrs["num_groups"]].numel() == 1:
        # PyTorch refuses one value per group: it is its own mean.
        return [np.broadcast_to(bias.reshape([-1] + [1] * (x.dim() - 2)).numpy(), x.shape)]
    return [group(x, scale, bias, attrs).numpy()]


@reference("ortrain::GroupNormalizationGrad")
def group_norm_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    dy, x, scale = tensors(inputs, 3)
    if scale is None:
        scale = torch.ones(x.shape[1], dtype=x.dtype)
    bias = torch.zeros_like(scale)
    if not x.numel():
        return [x.numpy(), bias.numpy(), bias.numpy()]
    if x[0, : x.shape[1] // attrs["num_groups"]].numel() == 1:
        # The same here: a constant result.
        return [np.zeros(x.shape), np.zeros(scale.shape), dy.sum((0, *range(2, x.dim()))).numpy()]
    return gradients(lambda a, b, c: group(a, b, c, attrs), dy, x, scale, bias)
