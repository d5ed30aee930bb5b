# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Extents that are 1 or 0, which a trace takes for larger ones wherever they are symbols.

So one graph serves a batch of 1 and of 8. An operator whose result has another shape for them is another operator
then: ``squeeze`` drops an axis of 1 and keeps any other. What a trace says of shapes is compared with what the operators
say for the sizes of the sample, and extents that are squeezed may not be 1 in later calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from ortrain.capture import size_internals
from ortrain.capture.captured import Dimension
from ortrain.capture.meta_values import Call, kind_of, number_of
from ortrain.capture.trace_internals import nodes_of

_SQUEEZES = re.compile(r"aten\.squeeze(_copy)?\.(?P<which>\w+)")


def at_one(
    program: torch.export.ExportedProgram, dims: Sequence[Dimension], names: Sequence[str]
) -> tuple[str, list[str]]:
    """Return why sizes have to be numbers, '' where they need not, and else what sizes have to fulfil.

    Args:
      program: As exported, or without writes.
      dims: What its symbols stand for.
      names: Of the arguments.
    """
    if any(number_of(size) == 1 for size in _squeezed(program)):
        return "an extent of 1 is squeezed", []
    if operator := _other_at_one(program):
        return f"{operator} gives another shape for an extent of 1 or 0", []
    return "", _conditions_on_squeezed(program, dims, names)


def _other_at_one(program: torch.export.ExportedProgram) -> str:
    """Return an operator whose result the trace gives another shape than it has for the sample's sizes, or ''."""
    known: set[Any] = set()
    for node in _operators(program):
        call, results = Call(node), pytree.tree_leaves(node.meta.get("val"))
        if not any(map(_has_small_symbol, (*call.values, *results))):
            continue
        expected = list(map(kind_of, results))
        key = (*call.key, *expected)
        if key in known:
            continue
        known.add(key)
        ran = call.run()
        if ran is not None and list(map(kind_of, ran[1])) != expected:
            return str(node.target)
    return ""


def _conditions_on_squeezed(
    program: torch.export.ExportedProgram, dims: Sequence[Dimension], names: Sequence[str]
) -> list[str]:
    """Return the conditions under which no extent that is squeezed is 1, as those of an export."""
    places = {str(d.symbol): f"L['{names[d.index]}'].size()[{d.axis}]" for d in dims}
    expressions = {size_internals.size_expression(size) for size in _squeezed(program)}
    texts = sorted(PythonPrinter().doprint(e) for e in expressions if isinstance(e, sympy.Expr))
    return [re.sub(r"[A-Za-z_]\w*", lambda m: places.get(m[0], m[0]), f"{t} != 1") for t in texts]


def _operators(program: torch.export.ExportedProgram) -> Iterator[fx.Node]:
    for node in nodes_of(program):
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            yield node


def _squeezed(program: torch.export.ExportedProgram) -> Iterator[Any]:
    """Yield the symbolic extents that operators drop where they are 1."""
    for node in _operators(program):
        found = _SQUEEZES.fullmatch(str(node.target))
        if found is None:
            continue
        shape = node.args[0].meta["val"].shape
        axes: Any = range(len(shape))
        if found["which"] != "default":
            axes = node.args[1] if len(node.args) > 1 else node.kwargs["dim"]
            axes = [axes] if isinstance(axes, int) else axes
        yield from (shape[axis] for axis in axes if len(shape) and not isinstance(shape[axis], int))


def _has_small_symbol(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(
        not isinstance(size, int) and number_of(size) in (0, 1) for size in value.shape
    )
