# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions of one tensor: exponentials, roots, rounding, tests, casts."""

from __future__ import annotations

import math
from typing import Any

import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.arithmetic import truncate
from ortrain.capture.convert.emitter import Emitter, Tensor
from ortrain.capture.convert.registry import converts
from ortrain.capture.dtypes import LOW_PRECISION, category

_FLOAT_FUNCTIONS = {
    "exp": ("Exp", ""),
    "log": ("Log", ""),
    "sqrt": ("Sqrt", ""),
    "reciprocal": ("Reciprocal", ""),
    "tanh": ("Tanh", ""),
    "sigmoid": ("Sigmoid", ""),
    "erf": ("Erf", ""),
    "sin": ("Sin", ""),
    "cos": ("Cos", ""),
    "tan": ("Tan", ""),
    "asin": ("Asin", ""),
    "acos": ("Acos", ""),
    "atan": ("Atan", ""),
    "sinh": ("Sinh", ""),
    "cosh": ("Cosh", ""),
    "asinh": ("Asinh", ""),
    "acosh": ("Acosh", ""),
    "atanh": ("Atanh", ""),
    "log1p": ("Log1p", "ortrain"),
    "expm1": ("Expm1", "ortrain"),
}


def _register_float_function(name: str, op: str, domain: str) -> None:
    @converts(f"aten.{name}.default")
    def function(e: Emitter, x: Tensor) -> Value:
        return e.node(op, e.floating(x), domain=domain)


for _name, (_op, _domain) in _FLOAT_FUNCTIONS.items():
    _register_float_function(_name, _op, _domain)


@converts("aten.special_erf.default")
def special_erf(e: Emitter, x: Tensor) -> Value:
    return e.node("Erf", e.floating(x))


@converts("aten.special_expit.default")
def special_expit(e: Emitter, x: Tensor) -> Value:
    return e.node("Sigmoid", e.floating(x))


@converts("aten.rsqrt.default")
def rsqrt(e: Emitter, x: Tensor) -> Value:
    return e.node("Reciprocal", e.node("Sqrt", e.floating(x)))


@converts("aten.neg.default", "aten.negative.default")
def neg(e: Emitter, x: Tensor) -> Value:
    return e.node("Neg", x)


@converts("aten.abs.default", "aten.absolute.default")
def absolute(e: Emitter, x: Tensor) -> Value:
    return e.node("Abs", x)


@converts("aten.sign.default", "aten.sgn.default")
def sign(e: Emitter, x: Tensor) -> Value:
    """Give 0 for NaN and for -0.0, where Sign gives back both."""
    if category(x.dtype) != 2:
        return x.value if x.dtype is torch.bool else e.node("Sign", x)
    zero = e.scalar(0, x.dtype)
    return e.where(e.node("Greater", e.node("Abs", x), zero), e.node("Sign", x), zero)


def _rounding(e: Emitter, x: Tensor, op: str) -> Value:
    return e.node(op, x) if category(x.dtype) == 2 else x.value


@converts("aten.floor.default")
def floor(e: Emitter, x: Tensor) -> Value:
    return _rounding(e, x, "Floor")


@converts("aten.ceil.default")
def ceil(e: Emitter, x: Tensor) -> Value:
    return _rounding(e, x, "Ceil")


@converts("aten.round.default")
def round_half_even(e: Emitter, x: Tensor) -> Value:
    return _rounding(e, x, "Round")


@converts("aten.round.decimals")
def round_decimals(e: Emitter, x: Tensor, decimals: int = 0) -> Value:
    if category(x.dtype) != 2 or decimals == 0:
        return _rounding(e, x, "Round")
    scale = e.scalar(10.0 ** abs(decimals), x.dtype)
    into, back = ("Mul", "Div") if decimals > 0 else ("Div", "Mul")
    return e.node(back, e.node("Round", e.node(into, x, scale)), scale)


@converts("aten.trunc.default", "aten.fix.default")
def trunc(e: Emitter, x: Tensor) -> Value:
    return truncate(e, x.value) if category(x.dtype) == 2 else x.value


@converts("aten.frac.default")
def frac(e: Emitter, x: Tensor) -> Value:
    return e.node("Sub", x, truncate(e, x.value))


@converts("aten.isnan.default")
def isnan(e: Emitter, x: Tensor) -> Value:
    return e.node("IsNaN", e.floating(x))


@converts("aten.isinf.default")
def isinf(e: Emitter, x: Tensor) -> Value:
    return e.node("IsInf", e.floating(x))


@converts("aten.isfinite.default")
def isfinite(e: Emitter, x: Tensor) -> Value:
    return e.node("Not", e.node("Or", isnan(e, x), isinf(e, x)))


@converts("aten.nan_to_num.default")
def nan_to_num(
    e: Emitter,
    x: Tensor,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Value:
    if category(x.dtype) != 2:
        return x.value
    limits = torch.finfo(x.dtype)
    high, low = (e.scalar(v, x.dtype) for v in (math.inf, -math.inf))
    up = e.scalar(limits.max if posinf is None else posinf, x.dtype)
    down = e.scalar(limits.min if neginf is None else neginf, x.dtype)
    result = e.where(e.node("IsNaN", x), e.scalar(nan or 0.0, x.dtype), x.value)
    result = e.where(e.node("Equal", x, high), up, result)
    return e.where(e.node("Equal", x, low), down, result)


@converts("aten.logit.default")
def logit(e: Emitter, x: Tensor, eps: float | None = None) -> Value:
    value = e.floating(x)
    given = dtype = e.dtype_of(value)
    if dtype in LOW_PRECISION:  # PyTorch rounds the result alone
        dtype = torch.float32
        value = e.cast(value, dtype)
    if eps is not None and (not isinstance(eps, (int, float)) or not eps <= 0.5):
        raise e.unsupported(f"an eps of {eps}")
    if eps is not None and eps >= 0:  # others say that there is none
        least, most = e.scalar(eps, dtype), e.scalar(1 - eps, dtype)
        outside = e.node("Or", e.node("Less", value, least), e.node("Greater", value, most))
        bound = e.node("StopGradient", e.node("Clip", value, least, most), domain="ortrain")
        value = e.where(outside, bound, value)  # NaN keeps its gradient, unlike that of Clip
    else:  # the gradient is NaN, too, where there is no logit
        zero, one = e.scalar(0.0, dtype), e.scalar(1.0, dtype)
        outside = e.node("Or", e.node("Less", value, zero), e.node("Greater", value, one))
        value = e.node("Mul", value, e.where(outside, e.scalar(math.nan, dtype), one))
    # Each by itself, so that the gradients at 0 and 1 are infinite.
    of_rest = e.node("Log", e.node("Sub", e.scalar(1.0, dtype), value))
    return e.cast(e.node("Sub", e.node("Log", value), of_rest), given)


@converts(
    "aten._to_copy.default",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.to.device",
    "aten.to.prim_dtype",
)
def to_copy(e: Emitter, x: Tensor, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Value:
    target = dtype or next((a for a in args if isinstance(a, torch.dtype)), x.dtype)
    return e.cast(x, target)


@converts("aten.to.other", "aten.type_as.default")
def type_as(e: Emitter, x: Tensor, other: Tensor, *_: Any, **__: Any) -> Value:
    return e.cast(x, other.dtype)


@converts(
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.alias.default",
    "aten.alias_copy.default",
    "aten.lift_fresh_copy.default",
    "aten.lift_fresh.default",
    "aten.positive.default",
    "aten.resolve_conj.default",
    "aten.resolve_neg.default",
)
def same_value(e: Emitter, x: Tensor) -> Value:
    del e
    return x.value


@converts("aten.detach.default", "aten.detach_copy.default")
def detach(e: Emitter, x: Tensor) -> Value:
    if category(x.dtype) < 2:
        return x.value
    return e.node("StopGradient", x, domain="ortrain")
