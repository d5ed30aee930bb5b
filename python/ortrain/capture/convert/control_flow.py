# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Branches and loops of a captured graph whose conditions are values: PyTorch decides and runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ortrain.capture import operator_internals


def _cond(
    condition: Any,
    if_true: Callable[..., Any],
    if_false: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> tuple[Any, ...]:
    """Run one of two graphs."""
    return tuple((if_true if bool(condition) else if_false)(*operands))


def _while_loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    carried: Sequence[Any],
    additional: Sequence[Any] = (),
) -> tuple[Any, ...]:
    """Run a graph as long as another one says so."""
    values = tuple(carried)
    while bool(condition(*values, *additional)):
        values = tuple(body(*values, *additional))
    return values


CONTROL_FLOW: dict[str, Callable[..., tuple[Any, ...]]] = {
    "cond": _cond,
    "while_loop": _while_loop,
}


def control_flow(target: Any) -> Callable[..., tuple[Any, ...]] | None:
    """Return what runs a higher-order operator on graphs in eager PyTorch, or None."""
    return CONTROL_FLOW.get(operator_internals.higher_order_name(target))
