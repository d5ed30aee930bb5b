# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Reshapes, permutations, joins and splits."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import INT64_MAX, INT64_MIN, Emitter, Tensor
from ortrain.capture.convert.registry import converts
from ortrain.capture.convert.sizes import Size, as_size, floor_div, modulo, product, same


def _solved(e: Emitter, x: Tensor, size: Sequence[Size]) -> list[Size]:
    """Replace the -1 of a view's size by what it stands for."""
    target = list(size)
    if -1 not in [s for s in target if isinstance(s, int)]:
        return target
    i = next(i for i, s in enumerate(target) if isinstance(s, int) and s == -1)
    rest = product(target[:i] + target[i + 1 :])
    if isinstance(rest, int) and rest == 0:
        raise e.unsupported("-1 beside a size of 0")
    whole = e.numel(x)
    quotient = sympy.cancel(sympy.sympify(whole) / sympy.sympify(rest))
    exact = quotient.is_integer or quotient.is_polynomial(*quotient.free_symbols)
    target[i] = as_size(quotient) if exact and quotient.is_integer else floor_div(whole, rest)
    return target


@converts(
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten.view_copy.default",
    "aten._reshape_copy.default",
)
def view(e: Emitter, x: Tensor, size: Sequence[Size]) -> Value:
    return e.reshape(x, _solved(e, x, size))


@converts("aten.view_as.default", "aten.reshape_as.default")
def view_as(e: Emitter, x: Tensor, other: Tensor) -> Value:
    return e.reshape(x, other.shape)


@converts("aten.flatten.using_ints")
def flatten(e: Emitter, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Value:
    if x.rank == 0:
        return e.reshape(x, [1])
    start, end = x.axis(start_dim), x.axis(end_dim)
    middle = e.numel(x, range(start, end + 1))
    return e.reshape(x, [*x.shape[:start], middle, *x.shape[end + 1 :]])


@converts("aten.unflatten.int")
def unflatten(e: Emitter, x: Tensor, dim: int, sizes: Sequence[Size]) -> Value:
    axis = x.axis(dim)
    part = Tensor(x.value, x.dtype, (x.shape[axis],))
    return e.reshape(x, [*x.shape[:axis], *_solved(e, part, sizes), *x.shape[axis + 1 :]])


@converts("aten.unsqueeze.default", "aten.unsqueeze_copy.default")
def unsqueeze(e: Emitter, x: Tensor, dim: int) -> Value:
    return e.unsqueeze(x, [dim + x.rank + 1 if dim < 0 else dim])


def _ones(x: Tensor, axes: Sequence[int]) -> list[int]:
    return [a for a in axes if isinstance(x.shape[a], int) and x.shape[a] == 1]


@converts("aten.squeeze.default", "aten.squeeze_copy.default")
def squeeze(e: Emitter, x: Tensor) -> Value:
    return e.squeeze(x, _ones(x, range(x.rank)))


@converts("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze_copy.dim")
def squeeze_dim(e: Emitter, x: Tensor, dim: int | Sequence[int]) -> Value:
    dims = [dim] if isinstance(dim, int) else dim
    return e.squeeze(x, _ones(x, sorted(x.axis(d) for d in dims)) if x.rank else [])


@converts("aten.transpose.int", "aten.swapaxes.default", "aten.transpose_copy.int")
def transpose(e: Emitter, x: Tensor, dim0: int, dim1: int) -> Value:
    order = list(range(x.rank))
    if x.rank:
        a, b = x.axis(dim0), x.axis(dim1)
        order[a], order[b] = order[b], order[a]
    return e.transpose(x, order)


@converts("aten.t.default", "aten.numpy_T.default", "aten.t_copy.default")
def reverse_axes(e: Emitter, x: Tensor) -> Value:
    return e.transpose(x, list(reversed(range(x.rank))))


@converts("aten.mT.default", "aten.mH.default", "aten.adjoint.default")
def matrix_transpose(e: Emitter, x: Tensor) -> Value:
    return transpose(e, x, -2, -1)


@converts("aten.permute.default", "aten.permute_copy.default")
def permute(e: Emitter, x: Tensor, dims: Sequence[int]) -> Value:
    return e.transpose(x, [x.axis(d) for d in dims])


@converts("aten.movedim.intlist", "aten.moveaxis.intlist")
def movedim(e: Emitter, x: Tensor, source: Sequence[int], destination: Sequence[int]) -> Value:
    order = [-1] * x.rank
    for a, b in zip(source, destination, strict=True):
        order[x.axis(b)] = x.axis(a)
    rest = iter(a for a in range(x.rank) if a not in order)
    return e.transpose(x, [next(rest) if a < 0 else a for a in order])


@converts("aten.movedim.int", "aten.moveaxis.int")
def movedim_int(e: Emitter, x: Tensor, source: int, destination: int) -> Value:
    return movedim(e, x, [source], [destination])


@converts("aten.expand.default", "aten.expand_copy.default")
def expand(e: Emitter, x: Tensor, size: Sequence[Size], implicit: bool = False) -> Value:
    del implicit
    lead = len(size) - x.rank
    target = [
        x.shape[i - lead] if isinstance(s, int) and s == -1 else s for i, s in enumerate(size)
    ]
    return e.expand(x, target)


@converts("aten.expand_as.default")
def expand_as(e: Emitter, x: Tensor, other: Tensor) -> Value:
    return e.expand(x, other.shape)


@converts("aten.broadcast_to.default")
def broadcast_to(e: Emitter, x: Tensor, size: Sequence[Size]) -> Value:
    return expand(e, x, size)


@converts("aten.cat.default", "aten.concat.default")
def cat(e: Emitter, tensors: Sequence[Tensor], dim: int = 0) -> Value:
    dtype = e.common_dtype(*tensors)
    # PyTorch lets an empty vector stand among tensors of any rank.
    rank = max(t.rank for t in tensors)
    kept = [t for t in tensors if not (t.rank == 1 and rank > 1 and same(t.shape[0], 0))]
    values = [e.cast(t, dtype) for t in kept]
    return values[0] if len(values) == 1 else e.node("Concat", *values, axis=kept[0].axis(dim))


@converts("aten.stack.default")
def stack(e: Emitter, tensors: Sequence[Tensor], dim: int = 0) -> Value:
    dtype = e.common_dtype(*tensors)
    axis = dim + tensors[0].rank + 1 if dim < 0 else dim
    values = [e.unsqueeze(e.cast(t, dtype), [axis]) for t in tensors]
    return values[0] if len(values) == 1 else e.node("Concat", *values, axis=axis)


@converts(
    "aten.split_with_sizes.default",
    "aten.split.sizes",
    "aten.split_with_sizes_copy.default",
    "aten.unsafe_split_with_sizes.default",
)
def split_with_sizes(
    e: Emitter, x: Tensor, split_sizes: Sequence[Size], dim: int = 0
) -> tuple[Value, ...]:
    if len(split_sizes) == 1:
        return (x.value,)
    return e.nodes("Split", len(split_sizes), x, e.vector(split_sizes), axis=x.axis(dim))


@converts("aten.split.Tensor", "aten.split_copy.Tensor", "aten.unsafe_split.Tensor")
def split(e: Emitter, x: Tensor, split_size: Size, dim: int = 0) -> tuple[Value, ...]:
    whole = x.shape[x.axis(dim)]
    return split_with_sizes(e, x, _pieces(e, whole, split_size), dim)


def _pieces(e: Emitter, whole: Size, size: Size) -> list[Size]:
    """Return the sizes of equal pieces, the last one smaller."""
    if isinstance(size, int) and size == 0:
        return [whole]
    count = -floor_div(-whole, size)
    if not isinstance(count, int):
        exact = sympy.simplify(sympy.sympify(whole) / sympy.sympify(size))
        if not exact.is_Integer:
            raise e.unsupported(f"the number of pieces of {whole} by {size} depends on the inputs")
        count = int(exact)
    count = max(count, 1)
    return [size] * (count - 1) + [as_size(whole - size * (count - 1))]


@converts("aten.chunk.default")
def chunk(e: Emitter, x: Tensor, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    whole = x.shape[x.axis(dim)]
    if not isinstance(whole, int):
        exact = sympy.simplify(sympy.sympify(whole) / chunks)
        if not exact.is_integer:
            raise e.unsupported(f"the number of pieces of {whole} depends on the inputs")
        return split_with_sizes(e, x, [as_size(exact)] * chunks, dim)
    return split_with_sizes(e, x, _pieces(e, whole, max(-(-whole // chunks), 1)), dim)


@converts("aten.unbind.int", "aten.unbind_copy.int")
def unbind(e: Emitter, x: Tensor, dim: int = 0) -> tuple[Value, ...]:
    axis = x.axis(dim)
    count = x.shape[axis]
    if not isinstance(count, int):
        raise e.unsupported(f"the number of results {count} depends on the inputs")
    return tuple(e.squeeze(v, [axis]) for v in split_with_sizes(e, x, [1] * count, axis))


@converts("aten.repeat.default")
def repeat(e: Emitter, x: Tensor, repeats: Sequence[Size]) -> Value:
    lead = len(repeats) - x.rank
    made = e.node("Tile", e.unsqueeze(x, range(lead)), e.vector(repeats))
    wide = (1,) * lead + x.shape
    if all(same(n, 1) or same(size, 1) for n, size in zip(repeats, wide, strict=True)):
        e.note_repeated(made, x, len(repeats))
    return made


@converts("aten.tile.default")
def tile(e: Emitter, x: Tensor, dims: Sequence[Size]) -> Value:
    return repeat(e, x, [1] * (x.rank - len(dims)) + list(dims))


@converts("aten.repeat_interleave.self_int")
def repeat_interleave(
    e: Emitter, x: Tensor, repeats: Size, dim: int | None = None, output_size: Size | None = None
) -> Value:
    del output_size
    if dim is None:
        flat = e.reshape(x, [e.numel(x)])
        x, dim = Tensor(flat, x.dtype, (e.numel(x),)), 0
    axis = x.axis(dim)
    wide = (*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :])
    target = (*x.shape[:axis], product((x.shape[axis], repeats)), *x.shape[axis + 1 :])
    return e.reshape(e.expand(e.unsqueeze(x, [axis + 1]), wide), target, wide)


@converts("aten.flip.default")
def flip(e: Emitter, x: Tensor, dims: Sequence[int]) -> Value:
    axes = [x.axis(d) for d in dims] if x.rank else []
    if not axes:
        return x.value
    count = len(axes)
    return e.node(
        "Slice",
        x,
        e.ints(*[-1] * count),
        e.ints(*[INT64_MIN] * count),
        e.ints(*axes),
        e.ints(*[-1] * count),
    )


@converts("aten.roll.default")
def roll(e: Emitter, x: Tensor, shifts: Sequence[Size], dims: Sequence[int] = ()) -> Value:
    shifts = [shifts] if isinstance(shifts, (int, sympy.Basic)) else shifts
    if not dims:
        whole = e.numel(x)
        flat = Tensor(e.reshape(x, [whole]), x.dtype, (whole,))
        return e.reshape(_rolled(e, flat.value, 0, shifts[0], whole), x.shape, [whole])
    result = x.value
    for shift, dim in zip(shifts, [dims] if isinstance(dims, int) else dims, strict=True):
        axis = x.axis(dim)
        result = _rolled(e, result, axis, shift, x.shape[axis])
    return result


def _rolled(e: Emitter, value: Value, axis: int, shift: Size, whole: Size) -> Value:
    if same(whole, 0):
        return value
    start = modulo(-shift, whole)
    if same(start, 0):
        return value
    return e.node(
        "Concat", e.slice(value, axis, start, INT64_MAX), e.slice(value, axis, 0, start), axis=axis
    )


_PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@converts("aten.pad.default")
def pad(
    e: Emitter, x: Tensor, pads: Sequence[Size], mode: str = "constant", value: float | None = None
) -> Value:
    if mode not in _PAD_MODES:
        raise e.unsupported(f"mode '{mode}'")
    if all(isinstance(p, int) and p == 0 for p in pads):
        return x.value
    count = len(pads) // 2
    # PyTorch lists (before, after) from the last axis on; the graph all before, then all after.
    before = [0] * (x.rank - count) + [pads[2 * i] for i in reversed(range(count))]
    after = [0] * (x.rank - count) + [pads[2 * i + 1] for i in reversed(range(count))]
    if mode == "circular":
        x, before, after = _cropped(e, x, before, after)
    fill = e.scalar(value or 0, x.dtype) if mode == "constant" else None
    return e.node("Pad", x, e.vector(before + after), fill, mode=_PAD_MODES[mode])


def _cropped(
    e: Emitter, x: Tensor, before: list[Size], after: list[Size]
) -> tuple[Tensor, list[Size], list[Size]]:
    """Take away what negative pads name; what is left is wrapped."""
    value, shape = x.value, list(x.shape)
    for axis, (first, last) in enumerate(zip(before, after, strict=True)):
        for pad in (first, last):
            if not (sympy.sympify(pad).is_nonnegative or sympy.sympify(pad).is_negative):
                raise e.unsupported(f"a pad {pad} that may be negative")
        less = [as_size(sympy.Max(0, -pad)) for pad in (first, last)]
        if less != [0, 0]:
            value = e.slice(value, axis, less[0], as_size(shape[axis] - less[1]))
            shape[axis] = as_size(shape[axis] - less[0] - less[1])
    return (
        Tensor(value, x.dtype, tuple(shape)),
        [as_size(sympy.Max(0, pad)) for pad in before],
        [as_size(sympy.Max(0, pad)) for pad in after],
    )


@converts("aten.constant_pad_nd.default")
def constant_pad_nd(e: Emitter, x: Tensor, pads: Sequence[Size], value: float = 0) -> Value:
    return pad(e, x, pads, "constant", value)


def _register_pad(name: str, mode: str) -> None:
    @converts(*(f"aten.{name}{n}d.default" for n in (1, 2, 3)))
    def padded(e: Emitter, x: Tensor, padding: Sequence[Size]) -> Value:
        return pad(e, x, padding, mode)


_register_pad("reflection_pad", "reflect")
_register_pad("replication_pad", "replicate")


@converts("aten.diff.default")
def diff(
    e: Emitter,
    x: Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Value:
    if n == 0:  # PyTorch leaves out what is put before and behind then
        return x.value
    axis = x.axis(dim)
    parts = [e.cast(t, x.dtype) for t in (prepend, x, append) if t is not None]
    value = parts[0] if len(parts) == 1 else e.node("Concat", *parts, axis=axis)
    for _ in range(n):
        high, low = e.slice(value, axis, 1, INT64_MAX), e.slice(value, axis, 0, -1)
        if x.dtype is torch.bool:
            value = e.node("Xor", high, low)
        else:
            value = e.node("Sub", high, low)
    return value


@converts("aten.pixel_shuffle.default")
def pixel_shuffle(e: Emitter, x: Tensor, upscale_factor: int) -> Value:
    *lead, c, h, w = x.shape
    r, n = upscale_factor, len(lead)
    split_shape = [*lead, floor_div(c, r * r), r, r, h, w]
    parts = e.reshape(x, split_shape)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    moved = e.transpose(parts, order)
    shape = [split_shape[i] for i in order]
    return e.reshape(moved, [*lead, shape[n], product([h, r]), product([w, r])], shape)
