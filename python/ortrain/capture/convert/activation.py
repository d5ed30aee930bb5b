# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Activations, softmax, dropout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import Emitter, Tensor
from ortrain.capture.convert.external import dropout_noise
from ortrain.capture.convert.registry import converts
from ortrain.random_numbers import DropoutSource


@converts("aten.relu.default")
def relu(e: Emitter, x: Tensor) -> Value:
    return e.node("Relu", x)


@converts("aten.relu6.default")
def relu6(e: Emitter, x: Tensor) -> Value:
    return hardtanh(e, x, 0.0, 6.0)


@converts("aten.hardtanh.default")
def hardtanh(e: Emitter, x: Tensor, min_val: Any = -1, max_val: Any = 1) -> Value:
    """Unlike clamp, it has no gradient at the bounds themselves."""
    least, most = e.scalar(min_val, x.dtype), e.scalar(max_val, x.dtype)
    outside = e.node("Or", e.node("LessOrEqual", x, least), e.node("GreaterOrEqual", x, most))
    bound = e.node("StopGradient", e.node("Clip", x, least, most), domain="ortrain")
    return e.where(outside, bound, x.value)


@converts("aten.leaky_relu.default")
def leaky_relu(e: Emitter, x: Tensor, negative_slope: float = 0.01) -> Value:
    return e.node("LeakyRelu", x, alpha=float(negative_slope))


@converts("aten.prelu.default", "aten._prelu_kernel.default")
def prelu(e: Emitter, x: Tensor, weight: Tensor) -> Value:
    slope = weight.value
    if "kernel" not in e.target and weight.rank == 1 and x.rank != 1:
        # One slope per channel, which is axis 1.
        slope = e.reshape(weight, [weight.shape[0], *[1] * max(x.rank - 2, 0)])
        if x.rank == 0:
            slope = e.reshape(weight, [])
    return e.where(e.node("Greater", x, e.scalar(0, x.dtype)), x.value, e.node("Mul", x, slope))


@converts("aten.gelu.default")
def gelu(e: Emitter, x: Tensor, approximate: str = "none") -> Value:
    return e.node("Gelu", x, approximate=approximate)


@converts("aten.silu.default")
def silu(e: Emitter, x: Tensor) -> Value:
    return e.node("Mul", x, e.node("Sigmoid", x))


@converts("aten.mish.default")
def mish(e: Emitter, x: Tensor) -> Value:
    return e.node("Mish", x)


@converts("aten.hardswish.default")
def hardswish(e: Emitter, x: Tensor) -> Value:
    return e.node("HardSwish", x)


@converts("aten.hardsigmoid.default")
def hardsigmoid(e: Emitter, x: Tensor) -> Value:
    moved = Tensor(e.node("Add", x, e.scalar(3.0, x.dtype)), x.dtype, x.shape)
    return e.node("Div", hardtanh(e, moved, 0.0, 6.0), e.scalar(6.0, x.dtype))


@converts("aten.elu.default")
def elu(e: Emitter, x: Tensor, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    value = x.value
    if input_scale != 1:
        negative = e.node(
            "Elu", e.node("Mul", x, e.scalar(input_scale, x.dtype)), alpha=float(alpha)
        )
        value = e.where(e.node("Greater", x, e.scalar(0, x.dtype)), x.value, negative)
    else:
        value = e.node("Elu", x, alpha=float(alpha))
    return value if scale == 1 else e.node("Mul", value, e.scalar(scale, x.dtype))


@converts("aten.selu.default")
def selu(e: Emitter, x: Tensor) -> Value:
    return elu(e, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@converts("aten.sinc.default")
def sinc(e: Emitter, x: Tensor) -> Value:
    """sin(pi x) / (pi x), and 1 with a gradient of 0 at 0."""
    dtype = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
    value = e.cast(x, dtype)
    one = e.scalar(1, dtype)
    is_zero = e.node("Equal", value, e.scalar(0, dtype))
    angle = e.node("Mul", e.where(is_zero, one, value), e.scalar(math.pi, dtype))
    return e.where(is_zero, one, e.node("Div", e.node("Sin", angle), angle))


@converts("aten.celu.default")
def celu(e: Emitter, x: Tensor, alpha: Any = 1) -> Value:
    scale = e.scalar(alpha, x.dtype)
    return e.node("Mul", scale, e.node("Elu", e.node("Div", x, scale), alpha=1.0))


@converts("aten.softplus.default")
def softplus(e: Emitter, x: Tensor, beta: Any = 1, threshold: Any = 20) -> Value:
    scaled = x.value if beta == 1 else e.node("Mul", x, e.scalar(beta, x.dtype))
    result = e.node("Softplus", scaled)
    if beta != 1:
        result = e.node("Div", result, e.scalar(beta, x.dtype))
    if threshold >= 20 and x.dtype is not torch.float64:
        # Above the threshold both branches round to the same number.
        return result
    return e.where(e.node("Greater", scaled, e.scalar(threshold, x.dtype)), x.value, result)


@converts("aten.log_sigmoid.default")
def log_sigmoid(e: Emitter, x: Tensor) -> Value:
    return e.node("Neg", e.node("Softplus", e.node("Neg", x)))


@converts("aten.threshold.default")
def threshold(e: Emitter, x: Tensor, threshold: Any, value: Any) -> Value:
    above = e.node("Greater", x, e.scalar(threshold, x.dtype))
    return e.where(above, x.value, e.scalar(value, x.dtype))


@converts("aten.hardshrink.default")
def hardshrink(e: Emitter, x: Tensor, lambd: Any = 0.5) -> Value:
    outside = e.node("Greater", e.node("Abs", x), e.scalar(lambd, x.dtype))
    return e.where(outside, x.value, e.scalar(0, x.dtype))


@converts("aten.softshrink.default")
def softshrink(e: Emitter, x: Tensor, lambd: Any = 0.5) -> Value:
    bound, zero = e.scalar(lambd, x.dtype), e.scalar(0, x.dtype)
    outside = e.node("Greater", e.node("Abs", x), bound)
    return e.where(outside, e.node("Sub", x, e.node("Mul", e.node("Sign", x), bound)), zero)


@converts("aten.glu.default")
def glu(e: Emitter, x: Tensor, dim: int = -1) -> Value:
    axis = x.axis(dim)
    whole = x.shape[axis]
    if not isinstance(whole, int):
        raise e.unsupported("the halved axis has a varying size")
    value, gate = e.nodes("Split", 2, x, e.ints(whole // 2, whole // 2), axis=axis)
    return e.node("Mul", value, e.node("Sigmoid", gate))


def _normalized(e: Emitter, op: str, x: Tensor, dim: int, dtype: torch.dtype | None) -> Value:
    value = e.cast(x, dtype) if dtype is not None else e.floating(x)
    if x.rank == 0:
        return e.squeeze(e.node(op, e.unsqueeze(value, [0]), axis=0), [0])
    return e.node(op, value, axis=x.axis(dim))


@converts("aten.softmax.int")
def softmax(e: Emitter, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Value:
    return _normalized(e, "Softmax", x, dim, dtype)


@converts("aten._softmax.default")
def softmax_half(e: Emitter, x: Tensor, dim: int, half_to_float: bool) -> Value:
    return _normalized(e, "Softmax", x, dim, torch.float32 if half_to_float else None)


@converts("aten.log_softmax.int")
def log_softmax(e: Emitter, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Value:
    return _normalized(e, "LogSoftmax", x, dim, dtype)


@converts("aten._log_softmax.default")
def log_softmax_half(e: Emitter, x: Tensor, dim: int, half_to_float: bool) -> Value:
    return _normalized(e, "LogSoftmax", x, dim, torch.float32 if half_to_float else None)


@converts("aten._safe_softmax.default")
def safe_softmax(e: Emitter, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Softmax that gives zeros, and a gradient of zeros, for a row of -inf."""
    masked = e.node("Equal", x, e.scalar(float("-inf"), x.dtype))
    lowest = e.reduce("ReduceMin", e.cast(masked, torch.int32), [x.axis(dim)], True)
    hidden = e.cast(lowest, torch.bool)
    # Softmax of such a row is NaN, which would come back through its gradient.
    seen = e.where(hidden, e.scalar(0, x.dtype), x.value)
    result = softmax(e, dataclasses.replace(x, value=seen), dim, dtype)
    return e.where(hidden, e.scalar(0, e.dtype_of(result)), result)


def drop(e: Emitter, x: Tensor, p: float) -> Value:
    """Return the dropout of ``x`` in training, ``p`` being above 0."""
    if p == 1:
        return _nothing_of(e, x)
    if e.dropout is DropoutSource.PYTORCH:
        return e.node("Mul", x, dropout_noise(e, x, p))
    return _dropout(e, x, p, with_mask=False)[0]


def _nothing_of(e: Emitter, x: Tensor) -> Value:
    """Return x * 0, as PyTorch drops all: with a gradient of zero, and NaN where x is not finite."""
    return e.node("Mul", x, e.scalar(0, x.dtype))


def _dropout(e: Emitter, x: Tensor, p: float, *, with_mask: bool) -> tuple[Value, Value | None]:
    seed, draw = e.seed(), {"ratio": float(p), "stream": e.stream()}
    result = e.node("Dropout", x, seed, domain="ortrain", **draw)
    mask = e.node("DropoutMask", x, seed, domain="ortrain", **draw) if with_mask else None
    return result, mask


@converts("aten.native_dropout.default")
def native_dropout(
    e: Emitter, x: Tensor, p: float, train: bool | None
) -> tuple[Value, Value | None]:
    with_mask = e.uses_result(1)
    if e.dropout is DropoutSource.PYTORCH and train is not False:
        raise e.unsupported("PyTorch draws its mask")
    if train is False or p in (0, 1):
        keeps = train is False or p == 0
        mask = e.full(x.shape, keeps, torch.bool) if with_mask else None
        return x.value if keeps else _nothing_of(e, x), mask
    return _dropout(e, x, p, with_mask=with_mask)


@converts("aten.dropout.default")
def dropout(e: Emitter, x: Tensor, p: float, train: bool) -> Value:
    if not train or p == 0:
        return x.value
    return drop(e, x, p)
