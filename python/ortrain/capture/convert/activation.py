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
from ortrain.capture.dtypes import LOW_PRECISION
from ortrain.random_numbers import DropoutSource


def _wide(e: Emitter, x: Tensor) -> Tensor:
    """Return ``x`` in the precision that PyTorch's kernels compute in."""
    if x.dtype not in LOW_PRECISION:
        return x
    return Tensor(e.cast(x, torch.float32), torch.float32, x.shape)


def _is_exact(number: Any, dtype: torch.dtype) -> bool:
    return bool(torch.tensor(number, dtype=dtype).item() == number)


@converts("aten.relu.default")
def relu(e: Emitter, x: Tensor) -> Value:
    return e.node("Relu", x)


@converts("aten.relu6.default")
def relu6(e: Emitter, x: Tensor) -> Value:
    return hardtanh(e, x, 0.0, 6.0)


@converts("aten.hardtanh.default")
def hardtanh(e: Emitter, x: Tensor, min_val: Any = -1, max_val: Any = 1) -> Value:
    """Unlike clamp, it has no gradient at the bounds themselves."""
    if any(not isinstance(n, (int, float)) or math.isnan(n) for n in (min_val, max_val)):
        raise e.unsupported(f"a bound of {min_val} or {max_val}")
    least, most = e.scalar(min_val, x.dtype), e.scalar(max_val, x.dtype)
    # For the gradient they are not rounded.
    wide = x if all(_is_exact(n, x.dtype) for n in (min_val, max_val)) else _wide(e, x)
    inside = e.node(
        "And",
        e.node("Greater", wide, e.scalar(min_val, wide.dtype)),
        e.node("Less", wide, e.scalar(max_val, wide.dtype)),
    )
    bound = e.node("StopGradient", e.node("Clip", x, least, most), domain="ortrain")
    return e.where(inside, x.value, bound)


@converts("aten.leaky_relu.default")
def leaky_relu(e: Emitter, x: Tensor, negative_slope: float = 0.01) -> Value:
    e.require_finite(negative_slope)
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
    e.require_finite(alpha, scale, input_scale)
    if input_scale == 1:
        value = e.node("Elu", x, alpha=float(alpha))
        return value if scale == 1 else e.node("Mul", value, e.scalar(scale, x.dtype))
    wide = _wide(e, x)
    zero = e.scalar(0, wide.dtype)
    falls = e.node("LessOrEqual", wide, zero)
    # Positive numbers would come to infinity, and to NaN in the gradient.
    scaled = e.node("Mul", e.where(falls, wide.value, zero), e.scalar(input_scale, wide.dtype))
    curve = e.node("Expm1", scaled, domain="ortrain")
    low = e.node("Mul", curve, e.scalar(float(alpha) * float(scale), wide.dtype))
    high = wide.value if scale == 1 else e.node("Mul", wide, e.scalar(scale, wide.dtype))
    return e.cast(e.where(falls, low, high), x.dtype)


@converts("aten.selu.default")
def selu(e: Emitter, x: Tensor) -> Value:
    return elu(e, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@converts("aten.sinc.default")
def sinc(e: Emitter, x: Tensor) -> Value:
    """sin(a) / a, a = pi x; near 0 by its series, since in the gradient all digits would cancel."""
    result = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
    dtype = torch.float32 if result in LOW_PRECISION else result
    angle = e.node("Mul", e.cast(x, dtype), e.scalar(math.pi, dtype))
    is_near = e.node("Less", e.node("Abs", angle), e.scalar(0.05, dtype))
    near = e.where(is_near, angle, e.scalar(0, dtype))
    square = e.node("Mul", near, near)
    series = e.scalar(-1 / 5040, dtype)
    for factor in (1 / 120, -1 / 6, 1):
        series = e.node("Add", e.node("Mul", square, series), e.scalar(factor, dtype))
    far = e.where(is_near, e.scalar(1, dtype), angle)
    return e.cast(e.where(is_near, series, e.node("Div", e.node("Sin", far), far)), result)


@converts("aten.celu.default")
def celu(e: Emitter, x: Tensor, alpha: Any = 1) -> Value:
    e.require_finite(alpha)
    return elu(e, x, alpha, 1, 1 / alpha)


@converts("aten.softplus.default")
def softplus(e: Emitter, x: Tensor, beta: Any = 1, threshold: Any = 20) -> Value:
    e.require_finite(beta, threshold)
    if beta == 0:
        raise e.unsupported("a beta of 0")
    usual = beta == 1 and threshold >= 20
    wide = x if usual else _wide(e, x)
    scaled = wide.value if beta == 1 else e.node("Mul", wide, e.scalar(beta, wide.dtype))
    result = e.node("Softplus", scaled)
    if beta != 1:
        result = e.node("Div", result, e.scalar(beta, wide.dtype))
    if threshold < 20 or x.dtype is torch.float64:
        # Above 20 both branches round to the same number.
        above = e.node("Greater", scaled, e.scalar(threshold, wide.dtype))
        result = e.where(above, wide.value, result)
    return e.cast(result, x.dtype)


@converts("aten.log_sigmoid.default")
def log_sigmoid(e: Emitter, x: Tensor) -> Value:
    return e.node("Neg", e.node("Softplus", e.node("Neg", x)))


@converts("aten.threshold.default")
def threshold(e: Emitter, x: Tensor, threshold: Any, value: Any) -> Value:
    # NaN is not below, and stays; so it is with the two that follow.
    wide = _wide(e, x)  # the threshold is not rounded
    below = e.node("LessOrEqual", wide, e.scalar(threshold, wide.dtype))
    return e.where(below, e.scalar(value, x.dtype), x.value)


@converts("aten.hardshrink.default")
def hardshrink(e: Emitter, x: Tensor, lambd: Any = 0.5) -> Value:
    e.require_finite(lambd)
    inside = e.node("LessOrEqual", e.node("Abs", x), e.scalar(lambd, x.dtype))
    return e.where(inside, e.scalar(0, x.dtype), x.value)


@converts("aten.softshrink.default")
def softshrink(e: Emitter, x: Tensor, lambd: Any = 0.5) -> Value:
    e.require_finite(lambd)
    bound, zero = e.scalar(lambd, x.dtype), e.scalar(0, x.dtype)
    inside = e.node("LessOrEqual", e.node("Abs", x), bound)
    return e.where(inside, zero, e.node("Sub", x, e.node("Mul", e.node("Sign", x), bound)))


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
