# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Sums, products, quotients, powers."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import NUMBERS, Emitter, Operand, Tensor
from ortrain.capture.convert.registry import converts
from ortrain.capture.dtypes import LOW_PRECISION, category


def _is_one(number: Any) -> bool:
    return not isinstance(number, sympy.Basic) and number == 1


def _scaled(e: Emitter, x: Operand, alpha: Any, dtype: torch.dtype) -> Any:
    """Return x * alpha as an operand of a sum in ``dtype``."""
    if _is_one(alpha):
        return x
    if category(dtype) < 2 and category(e.dtype_of(alpha)) >= 2:
        raise e.unsupported("a float times integers")  # PyTorch refuses it
    if not isinstance(x, Tensor) and not hasattr(x, "rank"):
        return x * alpha  # type: ignore[operator]
    return e.node("Mul", *e.operands(x, alpha, dtype=dtype))


def _low_precision_sum(
    e: Emitter, op: str, x: Operand, y: Operand, alpha: Any, dtype: torch.dtype
) -> Value:
    """Return x +- alpha * y, rounded once, after the sum; alpha itself is rounded, as in PyTorch."""
    left, right = e.operands(x, y, dtype=torch.float32)
    factor = e.cast(e.scalar(alpha, dtype), torch.float32)
    return e.cast(e.node(op, left, e.node("Mul", right, factor)), dtype)


@converts("aten.add.Tensor", "aten.add.Scalar")
def add(e: Emitter, x: Operand, y: Operand, alpha: Any = 1) -> Value:
    dtype = e.common_dtype(x, y)
    if dtype is torch.bool:
        if not _is_one(alpha):
            raise e.unsupported(f"an alpha of {alpha} for bools")
        return e.node("Or", *e.operands(x, y, dtype=dtype))
    if dtype in LOW_PRECISION and not _is_one(alpha):
        return _low_precision_sum(e, "Add", x, y, alpha, dtype)
    return e.arithmetic("Add", x, _scaled(e, y, alpha, dtype), dtype=dtype)


@converts("aten.sub.Tensor", "aten.sub.Scalar")
def sub(e: Emitter, x: Operand, y: Operand, alpha: Any = 1) -> Value:
    dtype = e.common_dtype(x, y)
    if any(e.dtype_of(operand) is torch.bool for operand in (x, y)):
        raise e.unsupported("bools")  # PyTorch refuses them
    if dtype in LOW_PRECISION and not _is_one(alpha):
        return _low_precision_sum(e, "Sub", x, y, alpha, dtype)
    return e.arithmetic("Sub", x, _scaled(e, y, alpha, dtype), dtype=dtype)


@converts("aten.rsub.Tensor", "aten.rsub.Scalar")
def rsub(e: Emitter, x: Operand, y: Operand, alpha: Any = 1) -> Value:
    return sub(e, y, x, alpha)


@converts("aten.mul.Tensor", "aten.mul.Scalar", "aten.multiply.Tensor")
def mul(e: Emitter, x: Operand, y: Operand) -> Value:
    dtype = e.common_dtype(x, y)
    if dtype is torch.bool:
        return e.node("And", *e.operands(x, y, dtype=dtype))
    return e.arithmetic("Mul", x, y, dtype=dtype)


def _float_dtype(e: Emitter, *operands: Operand) -> torch.dtype:
    dtype = e.common_dtype(*operands)
    return dtype if category(dtype) >= 2 else torch.get_default_dtype()


@converts("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor", "aten.divide.Tensor")
def div(e: Emitter, x: Operand, y: Operand) -> Value:
    return e.arithmetic("Div", x, y, dtype=_float_dtype(e, x, y))


@converts("aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.divide.Tensor_mode")
def div_mode(e: Emitter, x: Operand, y: Operand, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return div(e, x, y)
    if rounding_mode == "floor":
        return _floor_div(e, x, y)
    dtype = e.common_dtype(x, y)
    if category(dtype) == 1:
        return e.node("Div", *e.operands(x, y, dtype=dtype))
    operands = e.operands(x, y, dtype=_quotient_dtype(dtype, y))
    return e.cast(e.node("TruncDiv", *operands, domain="ortrain"), dtype)


def truncate(e: Emitter, value: Value) -> Value:
    """Round a float toward zero."""
    return e.node("Trunc", value, domain="ortrain")


@converts("aten.floor_divide.default", "aten.floor_divide.Scalar")
def floor_divide(e: Emitter, x: Operand, y: Operand) -> Value:
    return _floor_div(e, x, y, differentiable=0)


def _quotient_dtype(dtype: torch.dtype, divisor: Operand) -> torch.dtype:
    """Return what a quotient is computed in: a number is not rounded first, which one near a whole number would show."""
    is_number = dtype in LOW_PRECISION and isinstance(divisor, NUMBERS)
    return torch.float32 if is_number else dtype


def _floor_div(e: Emitter, x: Operand, y: Operand, **attributes: int) -> Value:
    dtype = e.common_dtype(x, y)
    operands = e.operands(x, y, dtype=_quotient_dtype(dtype, y))
    return e.cast(e.node("FloorDiv", *operands, domain="ortrain", **attributes), dtype)


@converts("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def remainder(e: Emitter, x: Operand, y: Operand) -> Value:
    dtype = e.common_dtype(x, y)
    a, b = e.operands(x, y, dtype=dtype)
    if category(dtype) == 1:
        return e.node("Mod", a, b, fmod=0)
    rest, zero = e.node("Mod", a, b, fmod=1), e.scalar(0, dtype)
    signs_differ = e.node("Xor", e.node("Less", rest, zero), e.node("Less", b, zero))
    moved = e.node("And", signs_differ, e.node("Not", e.node("Equal", rest, zero)))
    return e.where(moved, e.node("Add", rest, b), rest)


@converts("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(e: Emitter, x: Operand, y: Operand) -> Value:
    return e.node("Mod", *e.operands(x, y), fmod=1)


@converts("aten.pow.Tensor_Scalar", "aten.pow.Scalar", "aten.pow.Tensor_Tensor")
def power(e: Emitter, x: Operand, exponent: Operand) -> Value:
    dtype = e.common_dtype(x, exponent)
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool):
        assert isinstance(x, Tensor)
        if exponent == 0:
            return e.full(x.shape, 1, dtype)
        if exponent == 1:
            return e.cast(x, dtype)
        if exponent < 0 and category(dtype) < 2:
            raise e.unsupported("a negative power of integers")  # PyTorch refuses it
    # Numbers are rounded to the dtype, unlike those of a product.
    return e.node("Pow", *e.operands(x, exponent, dtype=dtype))


@converts("aten.square.default")
def square(e: Emitter, x: Tensor) -> Value:
    return power(e, x, 2)


@converts("aten.addcmul.default")
def addcmul(e: Emitter, x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Value:
    base, left, right = e.operands(x, a, b)
    dtype = e.common_dtype(x, a, b)
    product = e.node("Mul", left, right)
    if not _is_one(value):
        product = e.node("Mul", product, e.scalar(value, dtype))
    return e.node("Add", base, product)


@converts("aten.addcdiv.default")
def addcdiv(e: Emitter, x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Value:
    dtype = _float_dtype(e, x, a, b)
    base, left, right = e.operands(x, a, b, dtype=dtype)
    if not _is_one(value):
        left = e.node("Mul", left, e.scalar(value, dtype))
    return e.node("Add", base, e.node("Div", left, right))


@converts("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(e: Emitter, x: Tensor, end: Tensor, weight: Operand) -> Value:
    dtype = torch.float32 if x.dtype in LOW_PRECISION else x.dtype
    start, stop, factor = e.operands(x, end, weight, dtype=dtype)
    way = e.node("Sub", stop, start)

    def from_start() -> Value:
        return e.node("Add", start, e.node("Mul", factor, way))

    def from_end(rest: Value) -> Value:
        return e.node("Sub", stop, e.node("Mul", way, rest))

    # Counted from the nearer end.
    if isinstance(weight, (int, float)):
        near = abs(weight) < 0.5
        result = from_start() if near else from_end(e.scalar(1 - weight, dtype))
    else:
        is_near = e.node("Less", e.node("Abs", factor), e.scalar(0.5, dtype))
        rest = e.node("Sub", e.scalar(1, dtype), factor)
        result = e.where(is_near, from_start(), from_end(rest))
    return e.cast(result, x.dtype)


@converts("aten.maximum.default", "aten.max.other")
def maximum(e: Emitter, x: Tensor, y: Tensor) -> Value:
    dtype = e.common_dtype(x, y)
    return e.node("Or" if dtype is torch.bool else "Max", *e.operands(x, y, dtype=dtype))


@converts("aten.minimum.default", "aten.min.other")
def minimum(e: Emitter, x: Tensor, y: Tensor) -> Value:
    dtype = e.common_dtype(x, y)
    return e.node("And" if dtype is torch.bool else "Min", *e.operands(x, y, dtype=dtype))


@converts("aten.clamp.default", "aten.clip.default")
def clamp(e: Emitter, x: Tensor, min: Any = None, max: Any = None) -> Value:
    dtype = e.common_dtype(x, *[b for b in (min, max) if b is not None])
    low, high = (None if b is None else e.scalar(b, dtype) for b in (min, max))
    return e.node("Clip", e.cast(x, dtype), low, high)


@converts("aten.clamp_min.default")
def clamp_min(e: Emitter, x: Tensor, min: Any) -> Value:
    return clamp(e, x, min, None)


@converts("aten.clamp_max.default")
def clamp_max(e: Emitter, x: Tensor, max: Any) -> Value:
    return clamp(e, x, None, max)


@converts("aten.clamp.Tensor", "aten.clip.Tensor")
def clamp_tensor(
    e: Emitter,
    x: Tensor,
    min: Tensor | None = None,
    max: Tensor | None = None,
) -> Value:
    """Bound by tensors; by choice, not by Max and Min, whose gradient is shared at ties."""
    bounds = [b for b in (min, max) if b is not None]
    dtype = e.common_dtype(x, *bounds)
    result = value = e.cast(x, dtype)
    if min is not None:
        low = e.cast(min, dtype)
        if max is not None and dtype.is_floating_point:
            # Where the bounds are equal, neither has a gradient.
            stopped = e.node("StopGradient", low, domain="ortrain")
            low = e.where(e.node("Equal", low, e.cast(max, dtype)), stopped, low)
        result = e.where(e.node("Less", result, low), low, result)
    if max is not None:
        high = e.cast(max, dtype)
        result = e.where(e.node("Greater", result, high), high, result)
    if not dtype.is_floating_point:
        return result
    # What is NaN, or has a bound that is, is NaN and has no gradient.
    unknown = None
    total = value
    for operand in (value, *(e.cast(b, dtype) for b in bounds)):
        is_nan = e.node("Not", e.node("Equal", operand, operand))
        unknown = is_nan if unknown is None else e.node("Or", unknown, is_nan)
        total = total if operand is value else e.node("Add", total, operand)
    return e.where(unknown, e.node("StopGradient", total, domain="ortrain"), result)


@converts("aten.clamp_min.Tensor")
def clamp_min_tensor(e: Emitter, x: Tensor, min: Tensor) -> Value:
    return clamp_tensor(e, x, min, None)


@converts("aten.clamp_max.Tensor")
def clamp_max_tensor(e: Emitter, x: Tensor, max: Tensor) -> Value:
    return clamp_tensor(e, x, None, max)


@converts("aten.__lshift__.Scalar", "aten.bitwise_left_shift.Tensor_Scalar")
def shift_left(e: Emitter, x: Tensor, y: int) -> Value:
    return e.node("Mul", x, e.scalar(1 << y, x.dtype))


@converts("aten.__rshift__.Scalar", "aten.bitwise_right_shift.Tensor_Scalar")
def shift_right(e: Emitter, x: Tensor, y: int) -> Value:
    return e.node("FloorDiv", x, e.scalar(1 << y, x.dtype), domain="ortrain")


@converts("aten.exp2.default")
def exp2(e: Emitter, x: Tensor) -> Value:
    base = e.floating(x)
    return e.node("Pow", e.scalar(2.0, e.dtype_of(base)), base)
