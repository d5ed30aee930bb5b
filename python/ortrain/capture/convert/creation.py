# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Tensors made from nothing: fills, ranges, triangles, one-hot rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import Emitter, Operand, Tensor
from ortrain.capture.convert.registry import converts
from ortrain.capture.convert.sizes import Size, as_size
from ortrain.capture.dtypes import category

_MOST_BINS = 2**20  # times the range of int32 a number that float64 holds


def _dtype_of_fill(e: Emitter, value: Any, dtype: torch.dtype | None) -> torch.dtype:
    return dtype or e.dtype_of(value)


@converts("aten.zeros.default", "aten.empty.memory_format", "aten.empty_permuted.default")
def zeros(
    e: Emitter, size: Sequence[Size], *_: Any, dtype: torch.dtype | None = None, **__: Any
) -> Value:
    """Make zeros; memory that PyTorch leaves undefined is zero too."""
    return e.full(size, 0, dtype or torch.get_default_dtype())


@converts("aten.ones.default")
def ones(e: Emitter, size: Sequence[Size], dtype: torch.dtype | None = None) -> Value:
    return e.full(size, 1, dtype or torch.get_default_dtype())


@converts("aten.full.default")
def full(
    e: Emitter, size: Sequence[Size], fill_value: Any, dtype: torch.dtype | None = None
) -> Value:
    return e.full(size, fill_value, _dtype_of_fill(e, fill_value, dtype))


@converts("aten.scalar_tensor.default")
def scalar_tensor(e: Emitter, value: Any, dtype: torch.dtype | None = None) -> Value:
    return e.scalar(value, dtype or torch.get_default_dtype())


@converts("aten.new_zeros.default", "aten.new_empty.default")
def new_zeros(
    e: Emitter, x: Tensor, size: Sequence[Size], dtype: torch.dtype | None = None
) -> Value:
    return e.full(size, 0, dtype or x.dtype)


@converts("aten.new_ones.default")
def new_ones(
    e: Emitter, x: Tensor, size: Sequence[Size], dtype: torch.dtype | None = None
) -> Value:
    return e.full(size, 1, dtype or x.dtype)


@converts("aten.new_full.default")
def new_full(
    e: Emitter, x: Tensor, size: Sequence[Size], fill_value: Any, dtype: torch.dtype | None = None
) -> Value:
    return e.full(size, fill_value, dtype or x.dtype)


@converts("aten.zeros_like.default", "aten.empty_like.default")
def zeros_like(e: Emitter, x: Tensor, dtype: torch.dtype | None = None) -> Value:
    return e.full(x.shape, 0, dtype or x.dtype)


@converts("aten.ones_like.default")
def ones_like(e: Emitter, x: Tensor, dtype: torch.dtype | None = None) -> Value:
    return e.full(x.shape, 1, dtype or x.dtype)


@converts("aten.full_like.default")
def full_like(e: Emitter, x: Tensor, fill_value: Any, dtype: torch.dtype | None = None) -> Value:
    return e.full(x.shape, fill_value, dtype or x.dtype)


@converts("aten.fill.Scalar", "aten.fill.Tensor")
def fill(e: Emitter, x: Tensor, value: Operand) -> Value:
    return e.expand(e.operands(value, dtype=x.dtype)[0], x.shape)


@converts("aten.zero.default")
def zero(e: Emitter, x: Tensor) -> Value:
    return e.full(x.shape, 0, x.dtype)


@converts("aten.copy.default")
def copy(e: Emitter, x: Tensor, src: Tensor, non_blocking: bool = False) -> Value:
    del non_blocking
    converted = Tensor(e.cast(src, x.dtype), x.dtype, src.shape)
    return e.expand(converted, x.shape)


@converts("aten.arange.default")
def arange(e: Emitter, end: Any, dtype: torch.dtype | None = None) -> Value:
    return arange_step(e, 0, end, 1, dtype=dtype)


@converts("aten.arange.start")
def arange_start(e: Emitter, start: Any, end: Any, dtype: torch.dtype | None = None) -> Value:
    return arange_step(e, start, end, 1, dtype=dtype)


@converts("aten.arange.start_step")
def arange_step(
    e: Emitter, start: Any, end: Any, step: Any = 1, dtype: torch.dtype | None = None
) -> Value:
    integral = all(category(e.dtype_of(v)) < 2 for v in (start, end, step))
    target = dtype or (torch.int64 if integral else torch.get_default_dtype())
    if not integral and not any(isinstance(v, sympy.Basic) for v in (start, end, step)):
        return e.constant(torch.arange(start, end, step, dtype=target))
    # Floats count their steps in float64, as PyTorch does.
    work = torch.int64 if integral else torch.float64
    bounds = (e.scalar(v, work) for v in (start, end, step))
    return e.cast(e.node("Range", *bounds), target)


@converts("aten.linspace.default")
def linspace(
    e: Emitter, start: float, end: float, steps: Size, dtype: torch.dtype | None = None
) -> Value:
    target = dtype or torch.get_default_dtype()
    numbers = (start, end, steps)
    if not any(isinstance(v, sympy.Basic) for v in numbers):
        return e.constant(torch.linspace(start, end, int(steps), dtype=target))
    work = torch.float64
    index = e.node("Range", *(e.scalar(v, work) for v in (0, steps, 1)))
    first, last = e.scalar(start, work), e.scalar(end, work)
    intervals = e.node("Max", e.scalar(steps - 1, work), e.scalar(1, work))
    slope = e.node("Div", e.node("Sub", last, first), intervals)
    return e.cast(e.node("Add", first, e.node("Mul", index, slope)), target)


@converts("aten.eye.default")
def eye(e: Emitter, n: Size, dtype: torch.dtype | None = None) -> Value:
    return eye_m(e, n, n, dtype=dtype)


@converts("aten.eye.m")
def eye_m(e: Emitter, n: Size, m: Size, dtype: torch.dtype | None = None) -> Value:
    rows, columns = (arange_step(e, 0, size) for size in (n, m))
    return e.cast(
        e.node("Equal", e.unsqueeze(rows, [1]), columns), dtype or torch.get_default_dtype()
    )


@converts("aten.tril.default")
def tril(e: Emitter, x: Tensor, diagonal: int = 0) -> Value:
    return e.node("Trilu", x, e.scalar(diagonal, torch.int64), upper=0)


@converts("aten.triu.default")
def triu(e: Emitter, x: Tensor, diagonal: int = 0) -> Value:
    return e.node("Trilu", x, e.scalar(diagonal, torch.int64), upper=1)


@converts("aten.tril_indices.default", "aten.triu_indices.default")
def triangle_indices(
    e: Emitter, row: Size, col: Size, offset: int = 0, dtype: torch.dtype | None = None
) -> Value:
    if not (isinstance(row, int) and isinstance(col, int)):
        raise e.unsupported("the number of indices depends on the sizes of the inputs")
    make = torch.tril_indices if "tril" in e.target else torch.triu_indices
    return e.constant(make(row, col, offset, dtype=dtype or torch.int64))


@converts("aten.one_hot.default")
def one_hot(e: Emitter, x: Tensor, num_classes: Size = -1) -> Value:
    if isinstance(num_classes, int) and num_classes < 0:
        raise e.unsupported("num_classes=-1 makes the shape depend on values")
    classes = e.size(num_classes)
    checked = e.node("CheckIndices", x, classes, domain="ortrain")
    return e.node("OneHot", checked, classes, e.ints(0, 1), axis=-1)


@converts("aten.histc.default")
def histc(e: Emitter, x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Value:
    if min == max:
        raise e.unsupported("equal min and max take the range from the values")
    if not all(math.isfinite(v) for v in (min, max)):
        raise e.unsupported(f"range [{min}, {max}] is not finite")
    values: Tensor | Value = x
    if not x.dtype.is_floating_point:
        # PyTorch takes none on the CPU, and divides whole numbers elsewhere: float64 does that as
        # exactly for these.
        whole = all(v == int(v) and abs(v) < 2**31 for v in (min, max))
        exact = x.dtype is torch.int32 and whole and bins <= _MOST_BINS
        if e.traced.device.type == "cpu" or not exact:
            raise e.unsupported(f"a histogram of {x.dtype}")
        values = e.cast(x, torch.float64)
    counts = e.node(
        "BinCount", values, bins=int(bins), min=float(min), max=float(max), domain="ortrain"
    )
    return e.cast(counts, x.dtype)


@converts("aten.item.default", "aten._local_scalar_dense.default")
def item(e: Emitter, x: Tensor) -> Value:
    raise e.unsupported("a number read from a tensor is neither int nor float")


@converts("aten.sym_size.int")
def sym_size(e: Emitter, x: Tensor, dim: int) -> Value:
    return e.size(as_size(x.shape[x.axis(dim)]))
