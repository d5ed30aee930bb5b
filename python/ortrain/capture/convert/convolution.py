# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Convolutions, pooling, resampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import Emitter, Tensor
from ortrain.capture.convert.registry import converts
from ortrain.capture.convert.sizes import Size, product

Ints = int | Sequence[int]


def _each(value: Ints, count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _batched(e: Emitter, x: Tensor, spatial: int) -> tuple[Value, bool]:
    """Return x with a batch axis, and whether it had none."""
    if x.rank == spatial + 1:
        return e.unsqueeze(x, [0]), True
    return x.value, False


def _conv(
    e: Emitter,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
) -> Value:
    spatial = weight.rank - 2
    kernel = weight.shape[2:]
    dilations, strides = _each(dilation, spatial), _each(stride, spatial)
    if isinstance(padding, str):
        pads = _named_padding(e, padding, kernel, dilations)
    else:
        pads = _each(padding, spatial) * 2
    batched, added = _batched(e, x, spatial)
    result = e.node(
        "Conv",
        batched,
        weight,
        bias,
        strides=strides,
        pads=pads,
        dilations=dilations,
        group=int(groups),
        kernel_shape=[int(k) for k in kernel],
    )
    return e.squeeze(result, [0]) if added else result


def _named_padding(
    e: Emitter, padding: str, kernel: Sequence[Size], dilations: Sequence[int]
) -> list[int]:
    if padding == "valid":
        return [0] * (2 * len(dilations))
    if padding != "same" or not all(isinstance(k, int) for k in kernel):
        raise e.unsupported(f"padding '{padding}'")
    totals = [d * (int(k) - 1) for d, k in zip(dilations, kernel, strict=True)]
    return [t // 2 for t in totals] + [t - t // 2 for t in totals]


@converts(
    "aten.conv1d.default",
    "aten.conv2d.default",
    "aten.conv3d.default",
    "aten.conv1d.padding",
    "aten.conv2d.padding",
    "aten.conv3d.padding",
)
def conv(
    e: Emitter,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Value:
    return _conv(e, x, weight, bias, stride, padding, dilation, groups)


def _conv_transpose(
    e: Emitter,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
) -> Value:
    spatial = weight.rank - 2
    batched, added = _batched(e, x, spatial)
    result = e.node(
        "ConvTranspose",
        batched,
        weight,
        bias,
        strides=_each(stride, spatial),
        pads=_each(padding, spatial) * 2,
        output_padding=_each(output_padding, spatial),
        dilations=_each(dilation, spatial),
        group=int(groups),
        kernel_shape=[int(k) for k in weight.shape[2:]],
    )
    return e.squeeze(result, [0]) if added else result


@converts(
    "aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"
)
def conv_transpose(
    e: Emitter,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Value:
    return _conv_transpose(e, x, weight, bias, stride, padding, output_padding, groups, dilation)


@converts("aten.convolution.default")
def convolution(
    e: Emitter,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Value:
    if transposed:
        return _conv_transpose(
            e, x, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return _conv(e, x, weight, bias, stride, padding, dilation, groups)


def _pool_attributes(
    kernel_size: Ints, stride: Ints, padding: Ints, ceil_mode: bool, spatial: int
) -> dict[str, Any]:
    kernel = _each(kernel_size, spatial)
    return {
        "kernel_shape": kernel,
        "strides": _each(stride, spatial) if stride else kernel,
        "pads": _each(padding, spatial) * 2,
        "ceil_mode": int(ceil_mode),
    }


def _max_pool(
    e: Emitter,
    spatial: int,
    x: Tensor,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    indices: bool,
) -> tuple[Value, Value | None]:
    attributes = _pool_attributes(kernel_size, stride, padding, ceil_mode, spatial)
    attributes["dilations"] = _each(dilation, spatial)
    batched, added = _batched(e, x, spatial)
    if not indices:
        result = e.node("MaxPool", batched, **attributes)
        return (e.squeeze(result, [0]) if added else result), None
    result, places = e.nodes("MaxPool", 2, batched, **attributes)
    # The graph counts in the whole tensor, PyTorch in each plane.
    places = e.node("Mod", places, e.size(product(x.shape[x.rank - spatial :])), fmod=0)
    if added:
        return e.squeeze(result, [0]), e.squeeze(places, [0])
    return result, places


def _register_max_pool(spatial: int) -> None:
    @converts(f"aten.max_pool{spatial}d.default")
    def max_pool(
        e: Emitter,
        x: Tensor,
        kernel_size: Ints,
        stride: Ints = (),
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
    ) -> Value:
        return _max_pool(e, spatial, x, kernel_size, stride, padding, dilation, ceil_mode, False)[0]

    @converts(f"aten.max_pool{spatial}d_with_indices.default")
    def max_pool_with_indices(
        e: Emitter,
        x: Tensor,
        kernel_size: Ints,
        stride: Ints = (),
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
    ) -> tuple[Value, Value | None]:
        wanted = e.uses_result(1)
        return _max_pool(e, spatial, x, kernel_size, stride, padding, dilation, ceil_mode, wanted)


def _register_average_pool(spatial: int) -> None:
    @converts(f"aten.avg_pool{spatial}d.default")
    def average_pool(
        e: Emitter,
        x: Tensor,
        kernel_size: Ints,
        stride: Ints = (),
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:
        attributes = _pool_attributes(kernel_size, stride, padding, ceil_mode, spatial)
        if divisor_override is not None and ceil_mode:
            raise e.unsupported("divisor_override together with ceil_mode")
        include = count_include_pad or divisor_override is not None
        batched, added = _batched(e, x, spatial)
        result = e.node("AveragePool", batched, count_include_pad=int(include), **attributes)
        if divisor_override is not None:
            size = product(attributes["kernel_shape"])
            result = e.node("Mul", result, e.scalar(size / divisor_override, x.dtype))
        return e.squeeze(result, [0]) if added else result


for _spatial in (1, 2, 3):
    _register_max_pool(_spatial)
    _register_average_pool(_spatial)


# Of uneven bins along one axis, each of which is a node.
_MOST_BINS = 32


def _adaptive_average(e: Emitter, x: Tensor, bins: Sequence[int | None], spatial: int) -> Value:
    sizes = x.shape[x.rank - spatial :]
    wanted = [s if b is None else b for s, b in zip(sizes, bins, strict=True)]
    axes = list(range(x.rank - spatial, x.rank))
    if all(b == 1 for b in wanted):
        if x.rank == spatial + 2:
            return e.node("GlobalAveragePool", x)
        return e.reduce("ReduceMean", x, axes, True)
    if all(
        isinstance(s, int) and isinstance(b, int) and s % b == 0
        for s, b in zip(sizes, wanted, strict=True)
    ):
        kernel = [int(s) // int(b) for s, b in zip(sizes, wanted, strict=True)]
        batched, added = _batched(e, x, spatial)
        attributes = _pool_attributes(kernel, kernel, 0, False, spatial)
        result = e.node("AveragePool", batched, count_include_pad=1, **attributes)
        return e.squeeze(result, [0]) if added else result
    value = x.value
    for axis, size, count in zip(axes, sizes, wanted, strict=True):
        if count == size:
            continue
        if not isinstance(size, int) or not isinstance(count, int):
            raise e.unsupported(f"bins of size {count} over a varying size {size}")
        if count > _MOST_BINS:
            raise e.unsupported(f"{size} in {count} bins")
        ends = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        parts = [
            e.reduce("ReduceMean", e.slice(value, axis, start, end), [axis], True)
            for start, end in ends
        ]
        value = e.node("Concat", *parts, axis=axis)
    return value


def _register_adaptive_average(spatial: int) -> None:
    inner = [f"aten._adaptive_avg_pool{spatial}d.default"] if spatial > 1 else []

    @converts(f"aten.adaptive_avg_pool{spatial}d.default", *inner)
    def adaptive_average(e: Emitter, x: Tensor, output_size: Sequence[int | None]) -> Value:
        return _adaptive_average(e, x, _each(output_size, spatial), spatial)  # type: ignore[arg-type]

    @converts(f"aten.adaptive_max_pool{spatial}d.default")
    def adaptive_max(
        e: Emitter, x: Tensor, output_size: Sequence[int]
    ) -> tuple[Value, Value | None]:
        sizes = x.shape[x.rank - spatial :]
        bins = _each(output_size, spatial)
        if not all(isinstance(s, int) and s % b == 0 for s, b in zip(sizes, bins, strict=True)):
            raise e.unsupported(f"{list(sizes)} in bins {bins}")
        kernel = [int(s) // b for s, b in zip(sizes, bins, strict=True)]
        return _max_pool(e, spatial, x, kernel, kernel, 0, 1, False, e.uses_result(1))


for _spatial in (1, 2, 3):
    _register_adaptive_average(_spatial)


def _rows_by_steps(size: int, target: int, scale: float | None) -> torch.Tensor:
    step = torch.tensor(1.0 / scale if scale else size / target).float()
    rows = (torch.arange(target, dtype=torch.float32) * step).floor()
    return rows.to(torch.int64).clamp(max=size - 1)


def _source_rows(size: int, target: int, scale: float | None) -> torch.Tensor:
    """Return where each row comes from; a size that stays or doubles counts, whatever the scale."""
    if target in (size, 2 * size):
        return torch.arange(target) // (target // size)
    return _rows_by_steps(size, target, scale)


def _nearest(e: Emitter, x: Tensor, output_size: Sequence[Size] | None, scales: Any) -> Value:
    """Resize by nearest neighbours: a gather of constant positions per axis."""
    spatial = x.rank - 2
    value = x.value
    for i in range(spatial):
        size, axis = x.shape[2 + i], 2 + i
        scale = scales[i] if scales else None
        if not isinstance(size, int):
            value = _repeated(e, value, axis, size, scale, x)
            continue
        target = output_size[i] if output_size is not None else int(size * scale)
        if not isinstance(target, int):
            raise e.unsupported(f"a varying output size {target}")
        rows = _source_rows(size, target, scale)
        stepped = _rows_by_steps(size, target, scale)
        # PyTorch's backward always takes the former, its forward of images (two axes) too.
        if spatial != 2 and not torch.equal(rows, stepped):
            raise e.unsupported("its gradient goes to other places than its values come from")
        value = e.node("Gather", value, e.constant(rows), axis=axis)
    return value


def _repeated(e: Emitter, value: Value, axis: int, size: Size, scale: Any, x: Tensor) -> Value:
    # Steps of the rounded 1 / 41 fall short of whole numbers from the first one on, those of 1 / 3 never do.
    exact = scale == int(scale) if scale is not None else False
    if not exact or float(torch.tensor(1.0 / scale).float() * scale) < 1.0:
        raise e.unsupported(f"a scale of {scale} for a varying size {size}")
    positions = e.node("Range", *(e.size(v) for v in (0, product((size, int(scale))), 1)))
    rows = e.node("FloorDiv", positions, e.scalar(int(scale), torch.int64), domain="ortrain")
    return e.node("Gather", value, rows, axis=axis)


@converts(*(f"aten.upsample_nearest{n}d.vec" for n in (1, 2, 3)))
def upsample_nearest_vec(
    e: Emitter, x: Tensor, output_size: Sequence[Size] | None, scale_factors: Any
) -> Value:
    return _nearest(e, x, output_size, scale_factors)


@converts(*(f"aten.upsample_nearest{n}d.default" for n in (1, 2, 3)))
def upsample_nearest(
    e: Emitter, x: Tensor, output_size: Sequence[Size], *scales: float | None, **named: Any
) -> Value:
    given = [*scales, *named.values()]
    return _nearest(e, x, output_size, given if any(s is not None for s in given) else None)
