# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on numbers that vary: floats are computed in the order that is written, ints beyond 64 bits are held.

``v + 1e16 - 1e16`` is no ``v`` in floats, and ``1 - (1 - v)`` none for a small ``v``: to algebra such sums and products are
functions that it does not know. Ints of Python do not end at 64 bits: there a trace takes the values that its numbers
have, and a condition that they have them.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy import interp

_Binary = Callable[[SymNode, SymNode], SymNode]

# Ints beyond it may pass 64 bits when the numbers that they are made of grow.
_MOST = 2**40
_MOST_OF_SUMS = 2**63 - 1
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "_add": operator.add,
    "_sub": operator.sub,
    "_mul": operator.mul,
    "_float_truediv": operator.truediv,
    "_lshift": operator.lshift,
    "_pow_by_natural": operator.pow,
}
_traces = threading.local()


@contextmanager
def numbers_as_in_python() -> Iterator[None]:
    """Let numbers, in traces of this thread, have what their arithmetic gives in Python."""
    before, _traces.here = getattr(_traces, "here", False), True
    try:
        yield
    finally:
        _traces.here = before


class _OfFloats(sympy.Function):
    """An operation on two floats, each a formula, that is computed as it stands."""

    nargs = 2
    is_real = True
    sign = ""
    compute: Callable[[float, float], float]

    @classmethod
    def eval(cls, left: Any, right: Any) -> Any:
        """Return the value for two numbers."""
        if not (left.is_number and right.is_number):
            return None
        value = cls.compute(float(left), float(right))
        return sympy.Float(value) if math.isfinite(value) and value != 0 else None

    def _sympystr(self, printer: Any) -> str:
        left, right = map(printer._print, self.args)
        return f"(({left}) {self.sign} ({right}))"

    _torch_sympystr = _sympystr


class FloatSum(_OfFloats):
    """``left + right``."""

    sign = "+"
    compute = staticmethod(operator.add)


class FloatProduct(_OfFloats):
    """``left * right``."""

    sign = "*"
    compute = staticmethod(operator.mul)


def _watch() -> None:
    handlers = interp.handlers()
    handlers[FloatSum], handlers[FloatProduct] = "add", "mul"
    for name, operation in _OPERATIONS.items():
        if hasattr(SymNode, name):
            setattr(SymNode, name, _watched(name, getattr(SymNode, name), operation))
    SymNode._neg = _watched_negation(SymNode._neg)


def _watched(name: str, compute: _Binary, operation: Callable[[Any, Any], Any]) -> _Binary:
    @functools.wraps(compute)
    def computed(left: SymNode, right: SymNode) -> SymNode:
        result = compute(left, right)
        # A graph knows the node of a result, which came by here without it.
        if not getattr(_traces, "here", False) or get_proxy_mode() is not None:
            return result
        if result.pytype is int and _may_pass(name, result, left, right):
            return left.wrap_int(int(operation(left.guard_int("", 0), right.guard_int("", 0))))
        if result.pytype is not float:
            return result
        if _shows_signs_of_zero(name, left, right):
            return left.wrap_float(float(operation(_held(left), _held(right))))
        if name == "_float_truediv" or _stands_as_written(name, result, left, right):
            return result
        kind = FloatProduct if name == "_mul" else FloatSum
        other = _negated(right._expr) if name == "_sub" else right._expr
        return _with_formula(result, kind(left._expr, other))

    return computed


def _watched_negation(compute: Callable[[SymNode], SymNode]) -> Callable[[SymNode], SymNode]:
    @functools.wraps(compute)
    def computed(node: SymNode) -> SymNode:
        result = compute(node)
        is_watched = getattr(_traces, "here", False) and get_proxy_mode() is None
        if result.pytype is not float or not is_watched:
            return result
        return _with_formula(result, _negated(node._expr))

    return computed


def _negated(expr: Any) -> Any:
    """Return what is negative where a formula is positive; of a sum not the sum of the others, for zero has two signs."""
    return FloatProduct(sympy.Float(-1.0), expr) if expr.is_Add else -expr


def _with_formula(node: SymNode, expr: Any) -> SymNode:
    return SymNode(expr, node.shape_env, float, node._hint, fx_node=node.fx_node)


def _may_pass(name: str, result: SymNode, left: SymNode, right: SymNode) -> bool:
    hint = result._hint
    if type(hint) is int:
        return abs(hint) > (_MOST_OF_SUMS if name in ("_add", "_sub") else _MOST)
    numbers = [e for e in (left._expr, right._expr) if getattr(e, "is_Integer", False)]
    return any(abs(int(number)) > 2**31 for number in numbers)


def _shows_signs_of_zero(name: str, left: SymNode, right: SymNode) -> bool:
    """Tell whether an operation gives a zero of a sign that algebra does not know, or nothing that varies."""
    one, other = left._expr, right._expr
    if name == "_float_truediv":
        return bool(one.is_zero)
    if name == "_mul":
        return bool(one.is_zero or other.is_zero)
    hints = (node._hint for node in (left, right) if not node._expr.free_symbols)
    if any(hint == 0 and math.copysign(1.0, hint) < 0 for hint in hints if type(hint) is float):
        return True
    return bool(one.free_symbols) and one == (other if name == "_sub" else -other)


def _stands_as_written(name: str, result: SymNode, left: SymNode, right: SymNode) -> bool:
    """Tell whether a formula is nothing but its two parts, each a symbol or a number, summed or multiplied."""
    one, other = left._expr, right._expr
    if not one.free_symbols and not other.free_symbols:
        return True
    if not all(
        e.is_Atom or (type(e).__name__ == "ToFloat" and e.args[0].is_Atom) for e in (one, other)
    ):
        return False
    if name == "_sub":
        other = -other
    elif one == other:
        return True  # doubled or squared, which is exact
    expr = result._expr
    is_kind = expr.is_Mul if name == "_mul" else expr.is_Add
    return bool(is_kind) and set(expr.args) == {one, other}


def _held(node: SymNode) -> Any:
    """Return the value of a node, to which a condition holds it."""
    # Not the formula's value, for which both signs of zero are one.
    for symbol in node.expr.free_symbols:
        node.shape_env.evaluate_expr(symbol)
    if type(node._hint) in (int, float):
        return node._hint
    return node.guard_float("", 0) if node.pytype is float else node.guard_int("", 0)


# Before anything else changes these methods for the time of a trace.
_watch()
