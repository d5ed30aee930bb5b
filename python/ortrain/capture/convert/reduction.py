# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Sums, means, extremes and norms over axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import Emitter, Tensor
from ortrain.capture.convert.registry import converts
from ortrain.capture.convert.sizes import Size
from ortrain.capture.dtypes import LOW_PRECISION, category

Dims = int | Sequence[int] | None


def _sum_input(e: Emitter, x: Tensor, dtype: torch.dtype | None) -> Value:
    return e.cast(x, dtype or (torch.int64 if category(x.dtype) < 2 else x.dtype))


@converts("aten.sum.default")
def sum_all(e: Emitter, x: Tensor, dtype: torch.dtype | None = None) -> Value:
    return e.reduce("ReduceSum", _sum_input(e, x, dtype), None)


@converts("aten.sum.dim_IntList")
def sum_dims(
    e: Emitter, x: Tensor, dim: Dims, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    return e.reduce("ReduceSum", _sum_input(e, x, dtype), x.axes(dim), keepdim)


@converts("aten.mean.default")
def mean_all(e: Emitter, x: Tensor, dtype: torch.dtype | None = None) -> Value:
    return e.reduce("ReduceMean", e.cast(x, dtype or x.dtype), None)


@converts("aten.mean.dim")
def mean_dims(
    e: Emitter, x: Tensor, dim: Dims, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    return e.reduce("ReduceMean", e.cast(x, dtype or x.dtype), x.axes(dim), keepdim)


@converts("aten.prod.default")
def prod_all(e: Emitter, x: Tensor, dtype: torch.dtype | None = None) -> Value:
    return e.reduce("ReduceProd", _sum_input(e, x, dtype), None)


@converts("aten.prod.dim_int")
def prod_dim(
    e: Emitter, x: Tensor, dim: int, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Value:
    return e.reduce("ReduceProd", _sum_input(e, x, dtype), x.axes(dim), keepdim)


def _extreme(e: Emitter, op: str, x: Tensor, dim: Dims, keepdim: bool) -> Value:
    if x.dtype is torch.bool:
        return e.cast(e.reduce(op, e.cast(x, torch.int32), x.axes(dim), keepdim), torch.bool)
    return e.reduce(op, x, x.axes(dim), keepdim)


@converts("aten.amax.default")
def amax(e: Emitter, x: Tensor, dim: Dims = (), keepdim: bool = False) -> Value:
    return _extreme(e, "ReduceMax", x, dim, keepdim)


@converts("aten.amin.default")
def amin(e: Emitter, x: Tensor, dim: Dims = (), keepdim: bool = False) -> Value:
    return _extreme(e, "ReduceMin", x, dim, keepdim)


@converts("aten.max.default")
def max_all(e: Emitter, x: Tensor) -> Value:
    return _extreme(e, "ReduceMax", x, None, False)


@converts("aten.min.default")
def min_all(e: Emitter, x: Tensor) -> Value:
    return _extreme(e, "ReduceMin", x, None, False)


def _extreme_with_index(
    e: Emitter, op: str, x: Tensor, dim: int, keepdim: bool
) -> tuple[Value, Value]:
    """Return the extreme as the element at its index: the gradient goes to that element alone."""
    if x.rank == 0:
        return x.value, e.full((), 0, torch.int64)
    axis = x.axis(dim)
    ordered = e.cast(x, torch.int32) if x.dtype is torch.bool else x.value
    index = e.node(op, ordered, axis=axis, keepdims=1, select_last_index=0)
    value = e.node("GatherElements", x, index, axis=axis)
    if keepdim:
        return value, index
    return e.squeeze(value, [axis]), e.squeeze(index, [axis])


@converts("aten.max.dim")
def max_dim(e: Emitter, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _extreme_with_index(e, "ArgMax", x, dim, keepdim)


@converts("aten.min.dim")
def min_dim(e: Emitter, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _extreme_with_index(e, "ArgMin", x, dim, keepdim)


@converts("aten.aminmax.default")
def aminmax(
    e: Emitter, x: Tensor, dim: int | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    return _extreme(e, "ReduceMin", x, dim, keepdim), _extreme(e, "ReduceMax", x, dim, keepdim)


def _arg(e: Emitter, op: str, x: Tensor, dim: int | None, keepdim: bool) -> Value:
    ordered = e.cast(x, torch.int32) if x.dtype is torch.bool else x.value
    if x.rank == 0:
        return e.full((), 0, torch.int64)
    if dim is not None:
        return e.node(op, ordered, axis=x.axis(dim), keepdims=int(keepdim), select_last_index=0)
    flat = e.reshape(ordered, [e.numel(x)], x.shape)
    index = e.node(op, flat, axis=0, keepdims=0, select_last_index=0)
    return e.reshape(index, [1] * x.rank) if keepdim else index


@converts("aten.argmax.default")
def argmax(e: Emitter, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Value:
    return _arg(e, "ArgMax", x, dim, keepdim)


@converts("aten.argmin.default")
def argmin(e: Emitter, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Value:
    return _arg(e, "ArgMin", x, dim, keepdim)


def _truth(e: Emitter, op: str, x: Tensor, dim: Dims, keepdim: bool) -> Value:
    reduced = e.reduce(op, e.cast(e.cast(x, torch.bool), torch.int32), x.axes(dim), keepdim)
    # Over nothing the largest is below 0, the smallest above 1.
    truth = e.node("Greater", reduced, e.scalar(0, torch.int32))
    # torch.any of uint8 gives uint8.
    return e.cast(truth, torch.uint8) if x.dtype is torch.uint8 else truth


@converts("aten.any.default", "aten.any.dim", "aten.any.dims", "aten._is_any_true.default")
def any_true(e: Emitter, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Value:
    return _truth(e, "ReduceMax", x, dim, keepdim)


@converts("aten.all.default", "aten.all.dim", "aten.all.dims", "aten._is_all_true.default")
def all_true(e: Emitter, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Value:
    return _truth(e, "ReduceMin", x, dim, keepdim)


@converts("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero(e: Emitter, x: Tensor, dim: Dims = None) -> Value:
    return e.reduce("ReduceSum", e.cast(e.cast(x, torch.bool), torch.int64), x.axes(dim))


@converts("aten.cumsum.default")
def cumsum(e: Emitter, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Value:
    value = _sum_input(e, x, dtype)
    return value if x.rank == 0 else e.node("CumSum", value, e.scalar(x.axis(dim), torch.int64))


@converts("aten.logsumexp.default")
def logsumexp(e: Emitter, x: Tensor, dim: Dims, keepdim: bool = False) -> Value:
    axes, value = x.axes(dim), e.floating(x)
    dtype = e.dtype_of(value)
    top = e.node("StopGradient", e.reduce("ReduceMax", value, axes, True), domain="ortrain")
    # A row of -inf, or one with inf, is shifted by nothing.
    shift = e.where(e.node("IsInf", top), e.scalar(0.0, dtype), top)
    total = e.reduce("ReduceSum", e.node("Exp", e.node("Sub", value, shift)), axes, True)
    result = e.node("Add", e.node("Log", total), shift)
    return result if keepdim else e.squeeze(result, axes)


def _root(e: Emitter, x: Value) -> Value:
    """Square root whose gradient at 0 is 0, as that of norms and deviations in PyTorch."""
    dtype = e.dtype_of(x)
    zero = e.scalar(0, dtype)
    at_zero = e.node("Equal", x, zero)
    return e.where(at_zero, zero, e.node("Sqrt", e.where(at_zero, e.scalar(1, dtype), x)))


def _variance(
    e: Emitter, x: Tensor, dim: Dims, correction: Any, keepdim: bool, kind: torch.dtype
) -> tuple[Value, Value]:
    """Return variance and mean, computed in ``kind``."""
    axes = x.axes(dim)
    value = e.cast(x, kind)
    mean = e.reduce("ReduceMean", value, axes, True)
    centred = e.node("Sub", value, mean)
    total = e.reduce("ReduceSum", e.node("Mul", centred, centred), axes, True)
    correction = 1 if correction is None else correction
    e.require_finite(correction)
    count: Size = e.numel(x, axes)
    if correction > 1 and (isinstance(count, sympy.Basic) or count <= correction):
        raise e.unsupported(f"a correction of {correction} for {count} elements")
    if isinstance(count, sympy.Basic):
        degrees = e.node(
            "Max",
            e.node("Sub", e.scalar(count, kind), e.scalar(correction, kind)),
            e.scalar(0, kind),
        )
    else:
        degrees = e.scalar(max(count - correction, 0), kind)
    variance = e.node("Div", total, degrees)
    if keepdim:
        return variance, mean
    return e.squeeze(variance, axes), e.squeeze(mean, axes)


def _spread(
    e: Emitter,
    x: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    correction: Any = None,
) -> tuple[Value, Value]:
    """Return variance and mean, in float for 16 bits; the overload without axes has ``unbiased`` in second place."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased else 0
    kind = torch.float32 if x.dtype in LOW_PRECISION else x.dtype
    return _variance(e, x, dim, correction, keepdim, kind)


@converts("aten.var.correction", "aten.var.default", "aten.var.dim")
def var(e: Emitter, x: Tensor, *args: Any, **kwargs: Any) -> Value:
    return e.cast(_spread(e, x, *args, **kwargs)[0], x.dtype)


@converts("aten.std.correction", "aten.std.default", "aten.std.dim")
def std(e: Emitter, x: Tensor, *args: Any, **kwargs: Any) -> Value:
    return e.cast(_root(e, _spread(e, x, *args, **kwargs)[0]), x.dtype)


@converts("aten.var_mean.correction", "aten.var_mean.default", "aten.var_mean.dim")
def var_mean(e: Emitter, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Value, Value]:
    variance, mean = _spread(e, x, *args, **kwargs)
    return e.cast(variance, x.dtype), e.cast(mean, x.dtype)


@converts("aten.std_mean.correction", "aten.std_mean.default", "aten.std_mean.dim")
def std_mean(e: Emitter, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Value, Value]:
    variance, mean = _spread(e, x, *args, **kwargs)
    return e.cast(_root(e, variance), x.dtype), e.cast(mean, x.dtype)


@converts("aten.linalg_vector_norm.default")
def vector_norm(
    e: Emitter,
    x: Tensor,
    ord: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    result = dtype or x.dtype
    # Squares and sums of 16 bits are PyTorch's in float.
    kind = torch.float32 if result in LOW_PRECISION else result
    axes, value = x.axes(dim), e.cast(e.cast(x, result), kind)
    return e.cast(_norm(e, value, ord, axes, keepdim), result)


def _norm(e: Emitter, value: Value, ord: Any, axes: Sequence[int], keepdim: bool) -> Value:
    kind = e.dtype_of(value)
    magnitude = e.node("Abs", value)
    if ord in (math.inf, -math.inf):
        return e.reduce("ReduceMax" if ord > 0 else "ReduceMin", magnitude, axes, keepdim)
    if ord == 0:
        return e.reduce("ReduceSum", e.cast(e.cast(value, torch.bool), kind), axes, keepdim)
    if ord == 1:
        return e.reduce("ReduceSum", magnitude, axes, keepdim)
    if ord == 2:
        return _root(e, e.reduce("ReduceSum", e.node("Mul", value, value), axes, keepdim))
    zero, one = e.scalar(0, kind), e.scalar(1, kind)
    power = e.node("Pow", magnitude, e.scalar(ord, kind))
    if ord < 1:  # at 0 the slope is infinite, and PyTorch's gradient 0
        is_zero = e.node("Equal", magnitude, zero)
        slopeless = e.node("Pow", e.where(is_zero, one, magnitude), e.scalar(ord, kind))
        power = e.where(is_zero, e.node("StopGradient", power, domain="ortrain"), slopeless)
    total = e.reduce("ReduceSum", power, axes, keepdim)
    at_zero = e.node("Equal", total, zero)
    root = e.node("Pow", e.where(at_zero, one, total), e.scalar(1 / ord, kind))
    return e.where(at_zero, zero, root)


@converts("aten.cosine_similarity.default")
def cosine_similarity(e: Emitter, x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Value:
    """The gradient goes through norms below eps too, as if they were not raised to it."""
    e.require_finite(eps)
    result = e.common_dtype(x, y)
    dtype = torch.float32 if result in LOW_PRECISION else result
    rank = max(x.rank, y.rank)
    axis = dim + max(rank, 1) if dim < 0 else dim
    parts = []
    if x.rank != y.rank or (rank and x.shape[axis] != y.shape[axis]):
        # Norms are those of what was expanded.
        raise e.unsupported("operands of different ranks, or one that broadcasts along the axis")
    for operand in (x, y):
        given = Tensor(e.cast(operand, dtype), dtype, operand.shape)
        norm = vector_norm(e, given, 2, axis, keepdim=True)
        below = e.node("Sub", e.scalar(eps, dtype), norm)
        raised = e.node("Max", below, e.scalar(0, dtype))  # 0 for an infinite norm too
        least = e.node("Add", norm, e.node("StopGradient", raised, domain="ortrain"))
        parts.append(e.node("Div", given, least))
    return e.cast(e.reduce("ReduceSum", e.node("Mul", *parts), [axis] if rank else []), result)


@converts("aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype")
def norm_dims(
    e: Emitter,
    x: Tensor,
    p: Any,
    dim: Dims,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    return vector_norm(e, x, 2 if p is None else p, dim, keepdim, dtype)


@converts("aten.norm.Scalar")
def norm_all(e: Emitter, x: Tensor, p: Any = 2) -> Value:
    return vector_norm(e, x, p, None)
