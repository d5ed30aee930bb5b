# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Fake quantization: values on a grid of integers, gradients as if there were none."""

from __future__ import annotations

import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import Emitter, Tensor
from ortrain.capture.convert.registry import converts


def _fake_quantized(
    e: Emitter, x: Tensor, scale: Value, zero_point: Value, quant_min: int, quant_max: int
) -> Value:
    """(clamp(round(x / scale) + zero_point) - zero_point) scale; dx = dy where nothing is clamped."""
    inverse = e.node("Div", e.scalar(1.0, torch.float32), e.cast(scale, torch.float32))
    scaled = e.node("Mul", x, e.cast(inverse, x.dtype))
    zero, step = e.cast(zero_point, x.dtype), e.cast(scale, x.dtype)
    place = e.node("Add", e.node("Round", scaled), zero)
    low, high = e.scalar(quant_min, x.dtype), e.scalar(quant_max, x.dtype)
    inside = e.node("And", e.node("GreaterOrEqual", place, low), e.node("LessOrEqual", place, high))
    grid = e.node("Mul", e.node("Sub", e.node("Clip", place, low, high), zero), step)
    # A zero with the gradient of x where it is inside.
    kept = e.where(inside, x.value, e.scalar(0.0, x.dtype))
    straight = e.node("Sub", kept, e.node("StopGradient", kept, domain="ortrain"))
    return e.node("Add", e.node("StopGradient", grid, domain="ortrain"), straight)


@converts("aten.fake_quantize_per_tensor_affine.default")
def fake_quantize(
    e: Emitter, x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> Value:
    values = (e.scalar(scale, torch.float32), e.scalar(zero_point, torch.int64))
    return _fake_quantized(e, x, *values, quant_min, quant_max)


@converts("aten.fake_quantize_per_tensor_affine.tensor_qparams")
def fake_quantize_by_tensors(
    e: Emitter, x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int
) -> Value:
    values = [v.value if v.rank == 0 else e.reshape(v, []) for v in (scale, zero_point)]
    return _fake_quantized(e, x, *values, quant_min, quant_max)


@converts("aten.fake_quantize_per_channel_affine.default")
def fake_quantize_channels(
    e: Emitter,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int,
    quant_min: int,
    quant_max: int,
) -> Value:
    behind = list(range(1, x.rank - x.axis(axis)))
    values = [e.unsqueeze(v, behind) if behind else v.value for v in (scale, zero_point)]
    return _fake_quantized(e, x, *values, quant_min, quant_max)
