# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Convolutions as PyTorch computes them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tests.python.ops.registry import reference

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def same_pads(total: list[int], upper: bool) -> tuple[list[int], list[int]]:
    """Split the padding of each axis; the odd element goes to the end for SAME_UPPER."""
    halves = [t // 2 for t in total]
    rest = [t - h for t, h in zip(total, halves, strict=True)]
    return (halves, rest) if upper else (rest, halves)


def window_pads(attrs: dict, extents: list[int], kernel: list[int]) -> tuple[list[int], list[int]]:
    """Return the padding in front of and behind each spatial axis, auto_pad resolved."""
    rank = len(extents)
    auto_pad = attrs.get("auto_pad", "NOTSET")
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        strides = attrs.get("strides", [1] * rank)
        dilations = attrs.get("dilations", [1] * rank)
        total = []
        for size, k, s, d in zip(extents, kernel, strides, dilations, strict=True):
            out = -(-size // s)
            total.append(max((out - 1) * s + (k - 1) * d + 1 - size, 0))
        return same_pads(total, auto_pad == "SAME_UPPER")
    pads = [0] * (2 * rank) if auto_pad == "VALID" else attrs.get("pads", [0] * (2 * rank))
    return list(pads[:rank]), list(pads[rank:])


def pad_spatial(x: torch.Tensor, begin: list[int], end: list[int], value: float) -> torch.Tensor:
    """Pad (or, with negative numbers, crop) the spatial axes."""
    flat: list[int] = []
    for b, e in zip(reversed(begin), reversed(end), strict=True):
        flat += [b, e]
    return F.pad(x, flat, value=value)


def convolve(
    attrs: dict, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the convolution with the attributes of ONNX Conv."""
    rank = x.dim() - 2
    begin, end = window_pads(attrs, list(x.shape[2:]), list(w.shape[2:]))
    return CONV[rank](
        pad_spatial(x, begin, end, 0.0),
        w,
        bias,
        stride=list(attrs.get("strides", [1] * rank)),
        dilation=list(attrs.get("dilations", [1] * rank)),
        groups=attrs.get("group", 1),
    )


def tensors(inputs: list[np.ndarray | None]) -> list[torch.Tensor | None]:
    """Return the inputs as tensors; three are expected, absent ones as None."""
    given = [None if x is None else torch.from_numpy(np.array(x)) for x in inputs]
    return given + [None] * (3 - len(given))


@reference("Conv")
def conv(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, w, bias = tensors(inputs)
    return [convolve(attrs, x, w, bias).numpy()]


@reference("ortrain::ConvInputGrad")
def conv_input_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    dy, w, shape = tensors(inputs)
    x = torch.zeros(shape.tolist(), dtype=w.dtype, requires_grad=True)
    return [torch.autograd.grad(convolve(attrs, x, w, None), x, dy)[0].numpy()]


@reference("ortrain::ConvWeightGrad")
def conv_weight_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    dy, x, shape = tensors(inputs)
    w = torch.zeros(shape.tolist(), dtype=x.dtype, requires_grad=True)
    return [torch.autograd.grad(convolve(attrs, x, w, None), w, dy)[0].numpy()]


@reference("ConvTranspose")
def conv_transpose(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, w, bias = tensors(inputs)
    rank = x.dim() - 2
    strides = list(attrs.get("strides", [1] * rank))
    dilations = list(attrs.get("dilations", [1] * rank))
    y = CONV_TRANSPOSE[rank](x, w, stride=strides, dilation=dilations, groups=attrs.get("group", 1))
    extra = list(attrs.get("output_padding", [0] * rank))
    full = [size + e for size, e in zip(y.shape[2:], extra, strict=True)]
    auto_pad = attrs.get("auto_pad", "NOTSET")
    wanted = attrs.get("output_shape")
    if wanted is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [size * s for size, s in zip(x.shape[2:], strides, strict=True)]
    if wanted is not None:
        total = [max(f - w, 0) for f, w in zip(full, wanted, strict=True)]
        begin, _ = same_pads(total, auto_pad == "SAME_UPPER")
        size = list(wanted)
    else:
        begin, end = window_pads(attrs, list(x.shape[2:]), list(w.shape[2:]))
        size = [f - b - e for f, b, e in zip(full, begin, end, strict=True)]
    # Cut the output out of the full one; what lies beyond it got no contribution.
    behind = [b + n - f for b, n, f in zip(begin, size, y.shape[2:], strict=True)]
    y = pad_spatial(y, [-b for b in begin], behind, 0.0)
    if bias is not None:
        y = y + bias.reshape([-1] + [1] * rank)
    return [y.numpy()]
