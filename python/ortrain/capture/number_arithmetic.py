# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on numbers that vary, where algebra gives another formula than Python computes: such numbers are held.

``v + 1e16 - 1e16`` is no ``v`` in floats, ``(v - 1.0000001) * 1e16`` no ``1e16 * v - 1.0000001e16``; and ints of Python
do not end at 64 bits. There a trace takes the values that its numbers have, and a condition that they have them.
"""

from __future__ import annotations

import collections
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
from torch.fx.experimental.sym_node import SymNode

_Binary = Callable[[SymNode, SymNode], SymNode]

# Ints beyond it may pass 64 bits when the numbers that they are made of grow.
_MOST = 2**40
_MOST_OF_SUMS = 2**63 - 1
# Algebra with constants between these and their inverses is wrong by less than float32 shows.
_LARGE = 1e7
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "_add": operator.add,
    "_sub": operator.sub,
    "_mul": operator.mul,
    "_lshift": operator.lshift,
    "_pow_by_natural": operator.pow,
}
# Of an operation the sum or product that it is.
_KINDS = {"_add": "is_Add", "_sub": "is_Add", "_mul": "is_Mul"}
_traces = threading.local()


@contextmanager
def numbers_as_in_python() -> Iterator[None]:
    """Hold numbers, in traces of this thread, to what their arithmetic gives in Python."""
    before, _traces.here = getattr(_traces, "here", False), True
    try:
        yield
    finally:
        _traces.here = before


def _watch() -> None:
    for name, operation in _OPERATIONS.items():
        if hasattr(SymNode, name):
            setattr(SymNode, name, _watched(name, getattr(SymNode, name), operation))


def _watched(name: str, compute: _Binary, operation: Callable[[Any, Any], Any]) -> _Binary:
    @functools.wraps(compute)
    def computed(left: SymNode, right: SymNode) -> SymNode:
        result = compute(left, right)
        if not getattr(_traces, "here", False):
            return result
        if result.pytype is int:
            is_other = _may_pass(name, result, left, right)
        elif result.pytype is float and name in _KINDS:
            is_other = _is_rewritten(name, result._expr, left._expr, right._expr)
        else:
            is_other = False
        return _held(operation, result.pytype, left, right) if is_other else result

    return computed


def _may_pass(name: str, result: SymNode, left: SymNode, right: SymNode) -> bool:
    hint = result._hint
    if type(hint) is int:
        return abs(hint) > (_MOST_OF_SUMS if name in ("_add", "_sub") else _MOST)
    numbers = [e for e in (left._expr, right._expr) if getattr(e, "is_Integer", False)]
    return any(abs(int(number)) > 2**31 for number in numbers)


def _is_rewritten(name: str, result: Any, one: Any, other: Any) -> bool:
    """Tell whether a formula of floats is not just its two parts, summed or multiplied, and may differ for it."""
    kind = _KINDS[name]
    if name == "_sub":
        other = -other
    if one == other:
        return False  # doubled or squared, which is exact

    def parts(expr: Any) -> collections.Counter[Any]:
        return collections.Counter(expr.args if getattr(expr, kind) else (expr,))

    if parts(result) == parts(one) + parts(other):
        return False
    if result.free_symbols != one.free_symbols | other.free_symbols:
        return True
    numbers = (abs(float(n)) for e in (result, one, other) for n in e.atoms(sympy.Number))
    return any(n > _LARGE or 0 < n < 1 / _LARGE for n in numbers)


def _held(
    operation: Callable[[Any, Any], Any], kind: type, left: SymNode, right: SymNode
) -> SymNode:
    """Return what Python computes of the values of two nodes, which a condition holds them to."""

    def value(node: SymNode) -> Any:
        return node.guard_float("", 0) if node.pytype is float else node.guard_int("", 0)

    number = operation(value(left), value(right))
    return left.wrap_float(float(number)) if kind is float else left.wrap_int(int(number))


# Before anything else changes these methods for the time of a trace.
_watch()
