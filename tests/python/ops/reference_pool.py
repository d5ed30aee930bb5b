# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Pooling: PyTorch's where it has the same attributes, otherwise windows gathered one by one."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from tests.python.ops.reference_conv import window_pads
from tests.python.ops.registry import reference

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


class Windows:
    """The windows of an ONNX pooling over tensors of the given spatial extents."""

    def __init__(self, attrs: dict, extents: list[int]) -> None:
        rank = len(extents)
        self.extents = extents
        self.kernel = list(attrs["kernel_shape"])
        self.strides = list(attrs.get("strides", [1] * rank))
        self.dilations = list(attrs.get("dilations", [1] * rank))
        self.begin, self.end = window_pads(attrs, extents, self.kernel)
        self.ceil = bool(attrs.get("ceil_mode", 0))
        self.same = attrs.get("auto_pad", "NOTSET").startswith("SAME")

    def torch_takes_them(self) -> bool:
        """Whether PyTorch's pooling functions have these windows."""
        small = all(2 * b <= k for b, k in zip(self.begin, self.kernel, strict=True))
        return self.begin == self.end and small and not self.same

    def positions(self, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return input positions [out, kernel], and which are inside the input, the padding."""
        size, k, s, d = (v[axis] for v in (self.extents, self.kernel, self.strides, self.dilations))
        begin, end = self.begin[axis], self.end[axis]
        room = size + begin + end - (k - 1) * d - 1
        out = (math.ceil(room / s) if self.ceil and not self.same else room // s) + 1
        if self.ceil and (out - 1) * s >= size + begin:
            out -= 1
        at = np.arange(out)[:, None] * s - begin + np.arange(k)[None, :] * d
        return at, (at >= 0) & (at < size), at < size + end

    def gather(
        self, x: torch.Tensor, fill: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return windows [N, C, out..., prod(kernel)], their flat places and who is in the padding."""
        rank = len(self.extents)
        axes = [self.positions(axis) for axis in range(rank)]
        place = np.zeros([1] * (2 * rank), dtype=np.int64)
        inside = np.ones([1] * (2 * rank), dtype=bool)
        padded = inside
        for axis, (at, within, counted) in enumerate(axes):
            shape = [1] * (2 * rank)
            shape[axis], shape[rank + axis] = at.shape
            place = place * self.extents[axis] + at.clip(0, self.extents[axis] - 1).reshape(shape)
            inside = inside & within.reshape(shape)
            padded = padded & counted.reshape(shape)
        outs = [at.shape[0] for at, _, _ in axes]
        shape = (*outs, -1)
        places = torch.from_numpy(place.reshape(shape))
        mask = torch.from_numpy(inside.reshape(shape))
        values = x.flatten(2)[:, :, places.flatten()].reshape(*x.shape[:2], *places.shape)
        values = torch.where(mask, values, torch.tensor(fill, dtype=x.dtype))
        return values, torch.where(mask, places, -1), torch.from_numpy(padded.reshape(shape))


def max_pool(attrs: dict, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maxima and their places in each plane."""
    windows = Windows(attrs, list(x.shape[2:]))
    if windows.torch_takes_them() and x.numel():
        return MAX[x.dim() - 2](
            x,
            windows.kernel,
            windows.strides,
            windows.begin,
            windows.dilations,
            ceil_mode=windows.ceil,
            return_indices=True,
        )
    values, places, _ = windows.gather(x, -math.inf)
    y, arg = values.max(-1)
    return y, places.expand(values.shape).gather(-1, arg[..., None])[..., 0]


def average_pool(attrs: dict, x: torch.Tensor) -> torch.Tensor:
    windows = Windows(attrs, list(x.shape[2:]))
    counted = bool(attrs.get("count_include_pad", 0))
    if windows.torch_takes_them() and set(windows.dilations) == {1} and x.numel():
        return AVERAGE[x.dim() - 2](
            x, windows.kernel, windows.strides, windows.begin, windows.ceil, counted
        )
    values, places, padded = windows.gather(x, 0.0)
    count = (padded if counted else places >= 0).sum(-1)
    return values.sum(-1) / count.to(x.dtype)


def gradient(function, x_shape: tuple[int, ...], dy: np.ndarray) -> np.ndarray:
    """Return dx of a linear function by PyTorch's autograd."""
    gradients = torch.from_numpy(np.array(dy))
    x = torch.zeros(x_shape, dtype=gradients.dtype, requires_grad=True)
    return torch.autograd.grad(function(x), x, gradients)[0].numpy()


@reference("MaxPool")
def max_pool_reference(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x = torch.from_numpy(np.array(inputs[0]))
    y, places = max_pool(attrs, x)
    planes = torch.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * (x.dim() - 2))
    size = int(np.prod(x.shape[2:]))
    return [y.numpy(), torch.where(places < 0, -1, places + planes * size).numpy()]


@reference("ortrain::MaxPoolGrad")
def max_pool_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x = torch.from_numpy(np.array(inputs[1])).requires_grad_()
    y = max_pool(attrs, x)[0]
    return [torch.autograd.grad(y, x, torch.from_numpy(np.array(inputs[0])))[0].numpy()]


@reference("AveragePool")
def average_pool_reference(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    return [average_pool(attrs, torch.from_numpy(np.array(inputs[0]))).numpy()]


@reference("ortrain::AveragePoolGrad")
def average_pool_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    return [gradient(lambda x: average_pool(attrs, x), tuple(inputs[1]), inputs[0])]


def global_average(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).mean(-1).reshape(*x.shape[:2], *[1] * (x.dim() - 2))


@reference("GlobalAveragePool")
def global_average_pool(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    return [global_average(torch.from_numpy(np.array(inputs[0]))).numpy()]


@reference("ortrain::GlobalAveragePoolGrad")
def global_average_pool_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    return [gradient(global_average, tuple(inputs[1]), inputs[0])]


def global_max(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).max(-1).values.reshape(*x.shape[:2], *[1] * (x.dim() - 2))


@reference("GlobalMaxPool")
def global_max_pool(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    return [global_max(torch.from_numpy(np.array(inputs[0]))).numpy()]


@reference("ortrain::GlobalMaxPoolGrad")
def global_max_pool_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x = torch.from_numpy(np.array(inputs[1])).requires_grad_()
    dy = torch.from_numpy(np.array(inputs[0]))
    return [torch.autograd.grad(global_max(x), x, dy)[0].numpy()]


def adaptive(attrs: dict, x: torch.Tensor) -> torch.Tensor:
    return ADAPTIVE[x.dim() - 2](x, list(attrs["output_size"]))


@reference("ortrain::AdaptiveAveragePool")
def adaptive_average_pool(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    return [adaptive(attrs, torch.from_numpy(np.array(inputs[0]))).numpy()]


@reference("ortrain::AdaptiveAveragePoolGrad")
def adaptive_average_pool_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    return [gradient(lambda x: adaptive(attrs, x), tuple(inputs[1]), inputs[0])]
