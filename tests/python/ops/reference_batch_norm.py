# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Batch and instance normalisation as PyTorch computes them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tests.python.ops.registry import reference


def tensors(inputs: list[np.ndarray | None], count: int) -> list[torch.Tensor | None]:
    given = [None if x is None else torch.from_numpy(np.array(x)) for x in inputs]
    return given + [None] * (count - len(given))


def per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.reshape([-1] + [1] * (x.dim() - 2))


def channel_axes(x: torch.Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


@reference("ortrain::BatchNormTraining")
def batch_norm_training(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, scale, bias, mean, var = tensors(inputs, 5)
    momentum, epsilon = attrs.get("momentum", 0.1), attrs.get("epsilon", 1e-5)
    y = F.batch_norm(x, mean, var, scale, bias, True, momentum, epsilon)  # updates mean and var
    outputs = [y.numpy()]
    if mean is not None:
        outputs += [mean.numpy(), var.numpy()]
    if mean is not None and x.numel():
        axes = channel_axes(x)
        variance = x.var(axes, unbiased=False)
        outputs += [x.mean(axes).numpy(), torch.rsqrt(variance + epsilon).numpy()]
    return outputs


@reference("ortrain::BatchNormGrad")
def batch_norm_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    dy, x, scale, mean, invstd, d_next_mean, d_next_var, d_mean, d_invstd = tensors(inputs, 9)
    axes, momentum = channel_axes(x), attrs.get("momentum", 0.1)
    count = x.numel() // x.shape[1]
    if scale is None:
        scale = torch.ones_like(mean)
    centred = x - per_channel(mean, x)
    xhat = centred * per_channel(invstd, x)
    dx, dscale, dbias = torch.zeros_like(x), torch.zeros_like(scale), torch.zeros_like(scale)
    if dy is not None:
        dscale, dbias = (dy * xhat).sum(axes), dy.sum(axes)
        inner = dy - per_channel(dbias, x) / count - xhat * per_channel(dscale, x) / count
        dx = dx + per_channel(scale * invstd, x) * inner
    zero = torch.zeros_like(mean)
    from_mean = momentum * (zero if d_next_mean is None else d_next_mean)
    from_mean = from_mean + (zero if d_mean is None else d_mean)
    from_var = momentum * (zero if d_next_var is None else d_next_var) * count / max(count - 1, 1)
    from_var = from_var - 0.5 * invstd**3 * (zero if d_invstd is None else d_invstd)
    dx = dx + (per_channel(from_mean, x) + 2 * per_channel(from_var, x) * centred) / count
    return [dx.numpy(), dscale.numpy(), dbias.numpy()]


@reference("BatchNormalization")
def batch_normalization(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, scale, bias, mean, var = tensors(inputs, 5)
    epsilon, momentum = attrs.get("epsilon", 1e-5), attrs.get("momentum", 0.9)
    if not attrs.get("training_mode", 0):
        return [F.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon).numpy()]
    y = F.batch_norm(x, None, None, scale, bias, True, 0.0, epsilon)
    axes = channel_axes(x)
    mean = mean * momentum + x.mean(axes) * (1 - momentum)
    var = var * momentum + x.var(axes, unbiased=False) * (1 - momentum)
    return [y.numpy(), mean.numpy(), var.numpy()]


@reference("ortrain::BatchNormInferenceGrad")
def batch_norm_inference_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    dy, x, scale, mean, var = tensors(inputs, 5)
    bias = torch.zeros_like(scale)
    leaves = [t.requires_grad_() for t in (x, scale, bias, mean, var)]
    root = torch.sqrt(var + attrs.get("epsilon", 1e-5))
    y = (x - per_channel(mean, x)) / per_channel(root, x) * per_channel(scale, x)
    y = y + per_channel(bias, x)
    return [g.numpy() for g in torch.autograd.grad(y, leaves, dy)]


@reference("InstanceNormalization")
def instance_normalization(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, scale, bias = tensors(inputs, 3)
    if not x.numel():
        return [x.numpy()]
    epsilon = attrs.get("epsilon", 1e-5)
    return [F.instance_norm(x, weight=scale, bias=bias, eps=epsilon).numpy()]


@reference("ortrain::InstanceNormGrad")
def instance_norm_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    dy, x, scale = tensors(inputs, 3)
    bias = torch.zeros_like(scale)
    if not x.numel():
        return [x.numpy(), torch.zeros_like(scale).numpy(), bias.numpy()]
    leaves = [t.requires_grad_() for t in (x, scale, bias)]
    y = F.instance_norm(x, weight=scale, bias=bias, eps=attrs.get("epsilon", 1e-5))
    return [g.numpy() for g in torch.autograd.grad(y, leaves, dy)]
