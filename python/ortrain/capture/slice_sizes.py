# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""How long slices are while tracing: a formula of the sizes, whether or not the slice ends within the tensor.

PyTorch has such formulas of its own from 2.12 on. Before, a slice of which it cannot tell gets a length that depends on
values.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_impls
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false

from ortrain.capture.torch_internals import TORCH_VERSION

_SLICE = torch.ops.aten.slice.Tensor


def slices_have_formulas() -> contextlib.AbstractContextManager[None]:
    """Give slices of fake tensors lengths that are formulas of sizes and bounds."""
    return contextlib.nullcontext() if TORCH_VERSION >= (2, 12) else by_our_rule()


@contextlib.contextmanager
def by_our_rule() -> Iterator[None]:
    """Do it whatever PyTorch's own rule is."""
    rules = fake_impls.op_implementations_dict
    original = rules[_SLICE]

    def rule(
        mode: Any, op: Any, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
    ) -> Any:
        taken = _bounds(x, dim, start, end, step)
        if taken is None:
            return original(mode, op, x, dim, start, end, step)
        first, last = taken
        length = last - first if guard_or_false(last >= first) else torch.sym_max(last - first, 0)
        sizes, strides = list(x.size()), list(x.stride())
        offset = x.storage_offset() + first * strides[dim]
        sizes[dim], strides[dim] = (length + step - 1) // step, strides[dim] * step
        return x.as_strided(sizes, strides, offset)

    rules[_SLICE] = rule
    try:
        yield
    finally:
        rules[_SLICE] = original


def _bounds(x: Any, dim: int, start: Any, end: Any, step: Any) -> tuple[Any, Any] | None:
    """Return where a slice begins and ends, counted from the front; None where PyTorch has to say or refuse."""
    if not -x.dim() <= dim < x.dim() or x.is_quantized or not guard_or_false(step > 0):
        return None
    size = x.size(dim)
    if free_unbacked_symbols([size, step, *(bound for bound in (start, end) if bound is not None)]):
        return None
    first = 0 if start is None else _within(size, start)
    last = size if end is None or (type(end) is int and end == sys.maxsize) else _within(size, end)
    return None if first is None or last is None else (first, last)


def _within(size: Any, bound: Any) -> Any:
    """Return a bound counted from the front, from 0 to the size; None where its sign is not known."""
    if guard_or_false(bound >= 0):
        return bound if guard_or_false(bound <= size) else torch.sym_min(bound, size)
    if guard_or_false(bound < 0):
        return bound + size if guard_or_false(bound + size >= 0) else torch.sym_max(bound + size, 0)
    return None
