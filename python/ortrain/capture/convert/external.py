# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Nodes that run in PyTorch, in PyTorch's order where they may draw random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import Emitter, Tensor
from ortrain.capture.convert.sizes import Size
from ortrain.capture.dtypes import onnx_code
from ortrain.capture.escapes import EscapedCall, Layout, Operand


def add_external(
    e: Emitter,
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    results: Sequence[tuple[torch.dtype, Sequence[Size]]],
    *,
    draws: bool,
    fills: bool = False,
) -> list[Value]:
    """Add a node that runs a function in PyTorch.

    Args:
      e: Adds nodes.
      name: What the function is called in messages.
      function: Takes the arguments; returns a tensor, or a list or tuple of tensors.
      args: Its arguments, nested, tensors and sizes being those of the graph.
      kwargs: Its keyword arguments, likewise.
      results: The dtype and the sizes of each result.
      draws: Whether it may draw from PyTorch's generators. Such nodes run in the order in which
        they are added, whether their results are read or not.
      fills: Whether the function gets the results first and writes to them.

    Raises:
      TypeError: A graph has no such dtype.
    """
    types = [onnx_code(dtype) for dtype, _ in results]
    shapes = [e.vector(tuple(shape)) for _, shape in results]
    operands: list[Value] = []
    layouts: dict[int, Layout] = {}

    def stand_in(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if draws and leaf.layout is not None:
                layouts[len(operands)] = leaf.layout
            operands.append(leaf.value)
            return Operand(len(operands) - 1)
        if isinstance(leaf, sympy.Basic):
            operands.append(e.sizes.value(leaf))
            return Operand(len(operands) - 1, is_number=True)
        return leaf

    filled = pytree.tree_map(stand_in, (list(args), kwargs))
    if draws:
        operands.append(e.token if e.token is not None else e.scalar(0, torch.int64))
        types.append(onnx_code(torch.int64))
        shapes.append(e.ints())
    call = EscapedCall(name, function, *filled, draws=draws, layouts=layouts, fills=fills)
    e.escaped_calls.append(call)
    made = e.nodes(
        "External",
        len(types),
        *shapes,
        *operands,
        domain="ortrain",
        callable=call.key,
        types=types,
        site=e.stream(),
    )
    if draws:
        e.token = made[-1]
    return list(made[: len(results)])


def dropout_noise(e: Emitter, x: Tensor, p: float) -> Value:
    """Return what PyTorch's dropout of ``x`` multiplies it by: 0, or 1 / (1 - p)."""

    def draw(noise: torch.Tensor) -> None:
        ones = torch.ones_like(noise)
        if x.layout is not None:
            ones = x.layout.applied(ones)
        noise.copy_(torch.dropout(ones, p, True))

    return add_external(e, e.target, draw, [], {}, [(x.dtype, x.shape)], draws=True, fills=True)[0]
