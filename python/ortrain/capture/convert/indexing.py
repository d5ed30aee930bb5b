# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Slices, gathers and scatters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import (
    INT64_MAX,
    Emitter,
    Operand,
    Tensor,
    broadcast_shapes,
)
from ortrain.capture.convert.registry import converts
from ortrain.capture.convert.sizes import Size, as_size, floor_div, same
from ortrain.capture.dtypes import category


def _is_whole(start: Size | None, end: Size | None, step: Size, whole: Size) -> bool:
    to_end = end is None or same(end, whole) or (isinstance(end, int) and end >= INT64_MAX)
    return (start is None or same(start, 0)) and to_end and same(step, 1)


@converts("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_tensor(
    e: Emitter,
    x: Tensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> Value:
    axis = x.axis(dim)
    if _is_whole(start, end, step, x.shape[axis]):
        return x.value
    stop = INT64_MAX if end is None else end
    return e.slice(x, axis, 0 if start is None else start, stop, step)


@converts("aten.narrow.default", "aten.narrow_copy.default")
def narrow(e: Emitter, x: Tensor, dim: int, start: Size, length: Size) -> Value:
    # A start counted from the end would need "to the end" where the range ends there.
    axis = x.axis(dim)
    first = as_size(start + x.shape[axis]) if isinstance(start, int) and start < 0 else start
    return slice_tensor(e, x, dim, first, as_size(first + length))


@converts("aten.select.int", "aten.select_copy.int")
def select(e: Emitter, x: Tensor, dim: int, index: Size) -> Value:
    return e.node("Gather", x, e.size(index), axis=x.axis(dim))


@converts("aten.index_select.default")
def index_select(e: Emitter, x: Tensor, dim: int, index: Tensor) -> Value:
    flat = e.reshape(index, [1]) if index.rank == 0 else index.value
    flat = checked_indices(e, flat, x, dim)
    if x.rank == 0:
        return e.reshape(e.node("Gather", e.reshape(x, [1]), flat, axis=0), [])
    return e.node("Gather", x, flat, axis=x.axis(dim))


def checked_indices(e: Emitter, indices: Value, x: Tensor, dim: int) -> Value:
    """Return indices of which none may count from the end of an axis, as operators of ONNX let them."""
    extent = x.shape[x.axis(dim)] if x.rank > 0 else 1
    return e.node("CheckIndices", indices, e.size(extent), domain="ortrain")


@converts("aten.gather.default")
def gather(e: Emitter, x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Value:
    if sparse_grad:
        raise e.unsupported("sparse_grad=True")
    if x.rank == 0:
        flat = checked_indices(e, e.cast(index, torch.int64), x, dim)
        return e.reshape(e.node("Gather", e.reshape(x, [1]), flat, axis=0), index.shape)
    rows = _rows(e, x, dim, index)
    if rows is not None:
        return e.node("Gather", x, checked_indices(e, rows, x, dim), axis=x.axis(dim))
    places = checked_indices(e, e.cast(index, torch.int64), x, dim)
    return e.node("GatherElements", x, places, axis=x.axis(dim))


def _rows(e: Emitter, x: Tensor, dim: int, index: Tensor) -> Value | None:
    """Return which rows of an axis an index of elements stands for, where it says the same along others."""
    axis = x.axis(dim)
    if x.rank < 2 or any(
        not same(a, b)
        for k, (a, b) in enumerate(zip(x.shape, index.shape, strict=True))
        if k != axis
    ):
        return None
    return e.varies_along(index, axis)


@converts("aten.take.default")
def take(e: Emitter, x: Tensor, index: Tensor) -> Value:
    return e.node("Gather", e.reshape(x, [e.numel(x)]), index, axis=0)


Indices = Sequence[Tensor | None]


def _indexed_axes(e: Emitter, x: Tensor, indices: Indices) -> list[int]:
    axes = [a for a, index in enumerate(indices) if index is not None]
    for a in axes:
        index = indices[a]
        assert index is not None
        if index.dtype is torch.bool or index.dtype is torch.uint8:
            raise e.unsupported("the size of a result of boolean indexing depends on values")
    return axes


def _are_adjacent(axes: Sequence[int]) -> bool:
    return all(b == a + 1 for a, b in itertools.pairwise(axes))


def _front_order(rank: int, axes: Sequence[int]) -> list[int]:
    return [*axes, *(a for a in range(rank) if a not in axes)]


def _coordinates(e: Emitter, indices: Sequence[Tensor], shape: Sequence[Size]) -> Value:
    """Broadcast index tensors and join them as rows of coordinates."""
    parts = []
    for index in indices:
        wide = e.expand(Tensor(e.cast(index, torch.int64), torch.int64, index.shape), shape)
        parts.append(e.unsqueeze(wide, [len(shape)]))
    return parts[0] if len(parts) == 1 else e.node("Concat", *parts, axis=len(shape))


def _result_order(axes: Sequence[int], index_rank: int, rank: int) -> list[int]:
    """Return the order that puts the axes of a gather (index axes first) where PyTorch has them."""
    if not _are_adjacent(axes):
        return list(range(index_rank + rank - len(axes)))
    lead = axes[0]
    return [
        *range(index_rank, index_rank + lead),
        *range(index_rank),
        *range(index_rank + lead, index_rank + rank - len(axes)),
    ]


@converts("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(e: Emitter, x: Tensor, indices: Indices) -> Value:
    axes = _indexed_axes(e, x, indices)
    if not axes:
        return x.value
    chosen = [i for i in indices if i is not None]
    if len(axes) == 1:
        return e.node("Gather", x, chosen[0], axis=axes[0])
    shape = broadcast_shapes(*(i.shape for i in chosen))
    front = e.transpose(x, _front_order(x.rank, axes))
    gathered = e.node("GatherND", front, _coordinates(e, chosen, shape), batch_dims=0)
    return e.transpose(gathered, _result_order(axes, len(shape), x.rank))


@converts("aten.index_put.default", "aten._unsafe_index_put.default", "aten.index_put_.default")
def index_put(
    e: Emitter, x: Tensor, indices: Indices, values: Tensor, accumulate: bool = False
) -> Value:
    masked = _masked_put(e, x, indices, values, accumulate)
    if masked is not None:
        return masked
    axes = _indexed_axes(e, x, indices)
    chosen = [i for i in indices if i is not None]
    shape = broadcast_shapes(*(i.shape for i in chosen))
    order = _front_order(x.rank, axes)
    front_shape = [*shape, *(x.shape[a] for a in order[len(axes) :])]
    moved = _result_order(axes, len(shape), x.rank)
    wide = e.expand(
        Tensor(e.cast(values, x.dtype), x.dtype, values.shape), [front_shape[a] for a in moved]
    )
    updates = e.transpose(wide, _inverse(moved))
    target = e.transpose(x, order)
    result = e.node(
        "ScatterND",
        target,
        _coordinates(e, chosen, shape),
        updates,
        reduction="add" if accumulate else "none",
    )
    return e.transpose(result, _inverse(order))


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(i) for i in range(len(order))]


def _masked_put(
    e: Emitter, x: Tensor, indices: Indices, values: Tensor, accumulate: bool
) -> Value | None:
    """Write one number, or one row, where a mask over the leading axes is true."""
    mask = indices[0] if indices else None
    if mask is None or mask.dtype is not torch.bool or any(i is not None for i in indices[1:]):
        return None
    trailing = x.rank - mask.rank
    if values.rank > trailing + 1 or (values.rank == trailing + 1 and not same(values.shape[0], 1)):
        raise e.unsupported("the number of values written through a mask depends on values")
    condition = e.unsqueeze(mask, range(mask.rank, x.rank))
    new = e.cast(values, x.dtype)
    if accumulate:
        new = e.node("Add", x, new)
    return e.where(condition, new, x.value)


@converts("aten.masked_scatter.default", "aten.masked_select.default", "aten.nonzero.default")
def value_dependent(e: Emitter, *_: Any) -> Value:
    raise e.unsupported("sizes depend on values")


@converts("aten.slice_scatter.default")
def slice_scatter(
    e: Emitter,
    x: Tensor,
    src: Tensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> Value:
    axis = x.axis(dim)
    whole = x.shape[axis]
    value = e.cast(src, x.dtype)
    if _is_whole(start, end, step, whole):
        return value
    first = _from_the_front(e, 0 if start is None else start, whole)
    if not same(step, 1):
        return _strided_scatter(e, x, value, src.shape[axis], axis, first, step)
    parts = []
    if not same(first, 0):
        parts.append(e.slice(x, axis, 0, first))
    parts.append(value)
    last = as_size(first + src.shape[axis])
    if not same(last, whole):
        parts.append(e.slice(x, axis, last, INT64_MAX))
    return parts[0] if len(parts) == 1 else e.node("Concat", *parts, axis=axis)


def _from_the_front(e: Emitter, start: Size, whole: Size) -> Size:
    """Return where a slice begins, counted from the front."""
    if sympy.sympify(start).is_nonnegative:
        return start
    if not sympy.sympify(start).is_negative:
        raise e.unsupported(f"a start {start} that may be negative")
    return as_size(sympy.Max(0, start + whole))


def _strided_scatter(
    e: Emitter, x: Tensor, value: Value, count: Size, axis: int, first: Size, step: Size
) -> Value:
    order = _front_order(x.rank, [axis])
    steps = e.node("Mul", e.node("Range", *(e.size(v) for v in (0, count, 1))), e.size(step))
    rows = e.unsqueeze(e.node("Add", steps, e.size(first)), [1])
    result = e.node(
        "ScatterND", e.transpose(x, order), rows, e.transpose(value, order), reduction="none"
    )
    return e.transpose(result, _inverse(order))


@converts("aten.select_scatter.default")
def select_scatter(e: Emitter, x: Tensor, src: Tensor, dim: int, index: Size) -> Value:
    axis = x.axis(dim)
    row = Tensor(
        e.unsqueeze(e.cast(src, x.dtype), [axis]),
        x.dtype,
        (*x.shape[:axis], 1, *x.shape[axis + 1 :]),
    )
    first = as_size(index + x.shape[axis]) if isinstance(index, int) and index < 0 else index
    return slice_scatter(e, x, row, axis, first, as_size(first + 1))


def _scatter(
    e: Emitter,
    x: Tensor,
    dim: int,
    index: Tensor,
    updates: Value,
    reduction: str,
    onto: Value | None = None,
) -> Value:
    """Scatter to x, or to another value of its shape."""
    rows = checked_indices(e, e.cast(index, torch.int64), x, dim)
    base = x.value if onto is None else onto
    if x.rank == 0:
        flat = [
            e.reshape(v, [1], [1]) if v.rank else e.unsqueeze(v, [0]) for v in (base, rows, updates)
        ]
        return e.squeeze(e.node("ScatterElements", *flat, axis=0, reduction=reduction), [0])
    return e.node("ScatterElements", base, rows, updates, axis=x.axis(dim), reduction=reduction)


def _updates(e: Emitter, x: Tensor, index: Tensor, src: Tensor) -> Value:
    """Return the part of src that index reads."""
    value = e.cast(src, x.dtype)
    for axis in range(index.rank):
        if not same(index.shape[axis], src.shape[axis]):
            value = e.slice(value, axis, 0, index.shape[axis])
    return value


@converts("aten.scatter.src")
def scatter_src(e: Emitter, x: Tensor, dim: int, index: Tensor, src: Tensor) -> Value:
    return _scatter(e, x, dim, index, _updates(e, x, index, src), "none")


@converts("aten.scatter.value")
def scatter_value(e: Emitter, x: Tensor, dim: int, index: Tensor, value: Operand) -> Value:
    return _scatter(e, x, dim, index, e.full(index.shape, value, x.dtype), "none")


_REDUCTIONS = {
    "sum": "add",
    "add": "add",
    "prod": "mul",
    "multiply": "mul",
    "amax": "max",
    "amin": "min",
}


@converts("aten.scatter_add.default")
def scatter_add(e: Emitter, x: Tensor, dim: int, index: Tensor, src: Tensor) -> Value:
    updates, rows = _updates(e, x, index, src), _rows(e, x, dim, index)
    if rows is not None:
        length = (index.shape[x.axis(dim)],)
        row_indices = Tensor(checked_indices(e, rows, x, dim), index.dtype, length)
        return _rows_put(e, x, dim, row_indices, updates, "add")
    return _scatter(e, x, dim, index, updates, "add")


@converts("aten.scatter.reduce")
def scatter_reduce_src(
    e: Emitter, x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str
) -> Value:
    return _scatter(e, x, dim, index, _updates(e, x, index, src), _REDUCTIONS[reduce])


@converts("aten.scatter.value_reduce")
def scatter_reduce_value(
    e: Emitter, x: Tensor, dim: int, index: Tensor, value: Operand, reduce: str
) -> Value:
    return _scatter(e, x, dim, index, e.full(index.shape, value, x.dtype), _REDUCTIONS[reduce])


@converts("aten.scatter_reduce.two")
def scatter_reduce(
    e: Emitter,
    x: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    include_self: bool = True,
) -> Value:
    if reduce != "mean" and reduce not in _REDUCTIONS:
        raise e.unsupported(f"reduce='{reduce}'")
    if reduce == "mean" and not x.dtype.is_floating_point:
        raise e.unsupported(f"reduce='mean' of {x.dtype}")
    updates = _updates(e, x, index, src)
    base = x.value
    if not include_self:  # what is written to starts from what changes nothing
        start = e.full(index.shape, _neutral(reduce, x.dtype), x.dtype)
        base = _scatter(e, x, dim, index, start, "none")
    if reduce != "mean":
        result = _scatter(e, x, dim, index, updates, _REDUCTIONS[reduce], base)
        if include_self or reduce not in ("amin", "amax") or not x.dtype.is_floating_point:
            return result
        return _shared_with_self(e, x, dim, index, updates, result)
    total = _scatter(e, x, dim, index, updates, "add", base)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    ones = e.full(index.shape, 1, wide)
    counts = _scatter(e, x, dim, index, ones, "add", e.full(x.shape, int(include_self), wide))
    shares = e.node("Max", counts, e.full((), 1, wide))
    return e.cast(e.node("Div", e.cast(total, wide), shares), x.dtype)


def _shared_with_self(
    e: Emitter, x: Tensor, dim: int, index: Tensor, updates: Value, result: Value
) -> Value:
    """Return the result of amin or amax without x; of n updates that are it, each gets 1 / (n + 1) where x is it too.

    PyTorch's backward counts x among those that share a gradient, and gives it none.
    """
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    reached = Tensor(e.node("StopGradient", result, domain="ortrain"), x.dtype, x.shape)
    read = gather(e, reached, dim, index)
    are_it = e.cast(e.node("Equal", updates, read), wide)
    counts = _scatter(e, x, dim, index, are_it, "add", e.full(x.shape, 0, wide))
    share = e.node("Div", counts, e.node("Add", counts, e.full((), 1, wide)))
    is_shared = e.node(
        "And", e.node("Equal", x, reached), e.node("Greater", counts, e.full((), 0, wide))
    )
    is_shared = e.node(
        "And", is_shared, e.node("Less", e.node("Abs", x), e.scalar(math.inf, x.dtype))
    )
    part = e.node("Mul", result, e.cast(share, x.dtype))
    nothing = e.node("Sub", part, e.node("StopGradient", part, domain="ortrain"))  # with a gradient
    return e.where(is_shared, e.node("Add", reached, nothing), result)


def _neutral(reduce: str, dtype: torch.dtype) -> int | float:
    """Return what leaves every other operand of a reduction as it is."""
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype.is_floating_point:
        return -math.inf if reduce == "amax" else math.inf
    if dtype is torch.bool:
        return int(reduce == "amin")
    return torch.iinfo(dtype).min if reduce == "amax" else torch.iinfo(dtype).max


def _rows_put(
    e: Emitter, x: Tensor, dim: int, index: Tensor, source: Value, reduction: str
) -> Value:
    """Write whole rows of an axis."""
    if x.rank == 0:
        at = e.reshape(e.cast(index, torch.int64), [-1, 1])
        values = (e.reshape(x, [1]), at, e.reshape(source, [-1]))
        return e.reshape(e.node("ScatterND", *values, reduction=reduction), [])
    axis = x.axis(dim)
    order = _front_order(x.rank, [axis])
    rows = e.cast(e.unsqueeze(index, [index.rank]), torch.int64)
    if index.rank == 0:
        rows = e.unsqueeze(rows, [0])
    result = e.node(
        "ScatterND", e.transpose(x, order), rows, e.transpose(source, order), reduction=reduction
    )
    return e.transpose(result, _inverse(order))


def _checked(e: Emitter, index: Tensor, x: Tensor, dim: int) -> Tensor:
    return Tensor(checked_indices(e, index.value, x, dim), index.dtype, index.shape)


def _of_type(e: Emitter, source: Tensor, x: Tensor) -> Value:
    """Return the value of a source, which PyTorch takes in one type alone."""
    if source.dtype != x.dtype:
        raise e.unsupported(f"a source of {source.dtype} for a tensor of {x.dtype}")
    return source.value


@converts("aten.index_add.default")
def index_add(
    e: Emitter, x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any = 1
) -> Value:
    value = _of_type(e, source, x)
    if not same(alpha, 1):
        value = e.node("Mul", value, e.scalar(alpha, x.dtype))
    return _rows_put(e, x, dim, _checked(e, index, x, dim), value, "add")


@converts("aten.index_copy.default")
def index_copy(e: Emitter, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Value:
    return _rows_put(e, x, dim, _checked(e, index, x, dim), _of_type(e, source, x), "none")


@converts("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(e: Emitter, x: Tensor, dim: int, index: Tensor, value: Operand) -> Value:
    shape = list(x.shape) or [1]
    shape[x.axis(dim) if x.rank else 0] = index.shape[0] if index.rank else 1
    fill = e.expand(e.operands(value, dtype=x.dtype)[0], shape)
    return _rows_put(e, x, dim, index, fill, "none")


@converts("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(e: Emitter, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    first, second = x.axis(dim1), x.axis(dim2)
    rows, columns = x.shape[first], x.shape[second]
    if not (isinstance(rows, int) and isinstance(columns, int)) and not same(rows, columns):
        raise e.unsupported("a diagonal of a matrix whose two sizes vary")
    if isinstance(rows, int) and isinstance(columns, int):
        count: Size = max(
            min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0
        )
    else:
        count = as_size(rows - abs(offset))
    steps = e.node("Range", *(e.size(v) for v in (0, count, 1)))
    at = [steps, steps]
    if offset:
        moved = 1 if offset > 0 else 0
        at[moved] = e.node("Add", steps, e.size(abs(offset)))
    front = e.transpose(x, _front_order(x.rank, [first, second]))
    coordinates = e.node("Concat", *(e.unsqueeze(v, [1]) for v in at), axis=1)
    gathered = e.node("GatherND", front, coordinates, batch_dims=0)
    rank = x.rank - 1
    return e.transpose(gathered, [*range(1, rank), 0])


@converts("aten.unfold.default", "aten.unfold_copy.default")
def unfold(e: Emitter, x: Tensor, dimension: int, size: int, step: int) -> Value:
    """Take windows of an axis: gather their positions, then move the window last."""
    if x.rank == 0:
        raise e.unsupported("windows of a scalar")
    axis = x.axis(dimension)
    count = as_size(floor_div(as_size(x.shape[axis] - size), step) + 1)
    starts = e.node("Mul", e.node("Range", *(e.size(v) for v in (0, count, 1))), e.size(step))
    offsets = e.constant(torch.arange(size, dtype=torch.int64))
    windows = e.node("Gather", x, e.node("Add", e.unsqueeze(starts, [1]), offsets), axis=axis)
    order = [a for a in range(x.rank + 1) if a != axis + 1]
    return e.transpose(windows, [*order, axis + 1])


@converts("aten.topk.default")
def topk(
    e: Emitter,
    x: Tensor,
    k: Size,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[Value, ...]:
    if x.rank == 0:
        return x.value, e.full((), 0, torch.int64)
    return e.nodes(
        "TopK", 2, x, e.vector([k]), axis=x.axis(dim), largest=int(largest), sorted=int(sorted)
    )


@converts("aten.sort.default")
def sort(e: Emitter, x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Value, ...]:
    if x.rank == 0:
        return x.value, e.full((), 0, torch.int64)
    if category(x.dtype) == 0:
        values, order = topk_values(
            e, Tensor(e.cast(x, torch.int32), torch.int32, x.shape), dim, descending
        )
        return e.cast(values, torch.bool), order
    return topk_values(e, x, dim, descending)


def topk_values(e: Emitter, x: Tensor, dim: int, descending: bool) -> tuple[Value, ...]:
    """Sort an axis; equal elements keep their order."""
    axis = x.axis(dim)
    return e.nodes(
        "TopK", 2, x, e.vector([x.shape[axis]]), axis=axis, largest=int(descending), sorted=1
    )


@converts("aten.sort.stable")
def sort_stable(
    e: Emitter, x: Tensor, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Value, ...]:
    del stable
    return sort(e, x, dim, descending)


@converts("aten.argsort.default")
def argsort(e: Emitter, x: Tensor, dim: int = -1, descending: bool = False) -> Value:
    return sort(e, x, dim, descending)[1]


@converts("aten.argsort.stable")
def argsort_stable(
    e: Emitter, x: Tensor, stable: bool = True, dim: int = -1, descending: bool = False
) -> Value:
    del stable
    return sort(e, x, dim, descending)[1]


@converts("aten.embedding.default")
def embedding(
    e: Emitter,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    if scale_grad_by_freq or sparse:
        raise e.unsupported(f"scale_grad_by_freq={scale_grad_by_freq}, sparse={sparse}")
    if indices.dtype not in (torch.int32, torch.int64):  # of which traces say nothing up to 2.12
        raise e.unsupported(f"indices that are {indices.dtype}")
    rows = e.cast(indices, torch.int64)
    return e.node("Embedding", weight, rows, padding_idx=int(padding_idx), domain="ortrain")


@converts("aten.bucketize.Tensor", "aten.searchsorted.Tensor")
def bucketize(e: Emitter, x: Tensor, boundaries: Tensor, **options: Any) -> Value:
    """Count the boundaries below each element."""
    if "searchsorted" in e.target:
        x, boundaries = boundaries, x
    if boundaries.rank != 1 or options.get("sorter") is not None or options.get("side"):
        raise e.unsupported("boundaries that are not one sorted vector")
    dtype = e.common_dtype(x, boundaries)
    element, edge = e.unsqueeze(e.cast(x, dtype), [x.rank]), e.cast(boundaries, dtype)
    above = e.node("Greater" if options.get("right") else "GreaterOrEqual", edge, element)
    target = torch.int32 if options.get("out_int32") else torch.int64
    below = e.node("Not", above)
    if not dtype.is_floating_point:
        return e.reduce("ReduceSum", e.cast(below, target), [x.rank])
    # NaN lies behind all boundaries, those among them that are NaN behind the others.
    any_above = e.reduce("ReduceSum", e.cast(above, target), [x.rank])
    known = e.node("And", below, e.node("Equal", edge, edge))
    counts = (e.reduce("ReduceSum", e.cast(each, target), [x.rank]) for each in (known, below))
    return e.where(e.cast(any_above, torch.bool), *counts)


@converts("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(
    e: Emitter,
    x: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Value:
    return e.node(
        "GridSample",
        x,
        grid,
        mode=("linear", "nearest", "cubic")[interpolation_mode],
        padding_mode=("zeros", "border", "reflection")[padding_mode],
        align_corners=int(align_corners),
    )
