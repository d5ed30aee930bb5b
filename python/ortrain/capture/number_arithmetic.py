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
# So is a sum that is no smaller than this part of what it is made of.
_LEAST_PART = 2.0**-20
# Numbers that no formula has for its zeros.
_SAMPLES = (0.6180339887, 1.4142135623, -2.7182818284)
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "_add": operator.add,
    "_sub": operator.sub,
    "_mul": operator.mul,
    "_float_truediv": operator.truediv,
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
        elif result.pytype is not float:
            is_other = False
        elif name not in _KINDS:
            is_other = left._expr.is_zero  # whose sign algebra does not know
        else:
            is_other = _is_rewritten(name, result._expr, left._expr, right._expr)
            is_other = is_other or (name != "_mul" and _cancels(result, left, right))
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


def _cancels(result: SymNode, left: SymNode, right: SymNode) -> bool:
    """Tell whether a sum of computed numbers is so small, beside them, that it shows in which order they were computed.

    Asked of the numbers that are there, and of others, for which a sum is small that is nothing but its rounding.
    """
    nodes = result, left, right
    if not any(node._expr.is_Add or node._expr.is_Mul for node in (left, right)):
        return False
    hints = [node._hint for node in nodes]
    if all(type(hint) is float for hint in hints) and _is_small(*hints):
        return True
    symbols = sorted(result._expr.free_symbols, key=str)
    for start in _SAMPLES:
        values = {s: sympy.Float(start + 0.73 * i) for i, s in enumerate(symbols)}
        try:
            if not _is_small(*(float(node._expr.xreplace(values)) for node in nodes)):
                return False
        except (TypeError, ValueError, OverflowError):  # no number for such values
            return False
    return True


def _is_small(total: float, *operands: float) -> bool:
    return abs(total) <= _LEAST_PART * max(map(abs, operands)) != 0


def _held(
    operation: Callable[[Any, Any], Any], kind: type, left: SymNode, right: SymNode
) -> SymNode:
    """Return what Python computes of the values of two nodes, which conditions hold them to."""
    if kind is int:
        number = operation(left.guard_int("", 0), right.guard_int("", 0))
        return left.wrap_int(int(number))

    def value(node: SymNode) -> Any:
        # Not the formula's value, for which both signs of zero and all orders of terms are one.
        for symbol in node.expr.free_symbols:
            node.shape_env.evaluate_expr(symbol)
        if type(node._hint) in (int, float):
            return node._hint
        return node.guard_float("", 0) if node.pytype is float else node.guard_int("", 0)

    return left.wrap_float(float(operation(value(left), value(right))))


# Before anything else changes these methods for the time of a trace.
_watch()
