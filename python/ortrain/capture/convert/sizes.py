# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Sizes that depend on the inputs: sympy expressions, and their values in the graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sympy
import torch

from ortrain.capture import size_internals
from ortrain.capture.builder import Value
from ortrain.capture.errors import CaptureError

if TYPE_CHECKING:
    from ortrain.capture.convert.emitter import Emitter

Size = int | sympy.Expr

_UNARY = {
    "OpaqueUnaryFn_sqrt": "Sqrt",
    "OpaqueUnaryFn_exp": "Exp",
    "OpaqueUnaryFn_log": "Log",
    "OpaqueUnaryFn_sin": "Sin",
    "OpaqueUnaryFn_cos": "Cos",
    "OpaqueUnaryFn_tanh": "Tanh",
}
# Of floats to ints.
_ROUNDING = {"FloorToInt": "Floor", "CeilToInt": "Ceil", "RoundToInt": "Round"}


def as_size(expression: Any) -> Size:
    """Return an int where the expression is a constant."""
    if isinstance(expression, sympy.Basic) and expression.is_Integer:
        return int(expression)
    return expression


def product(sizes: list[Size] | tuple[Size, ...]) -> Size:
    """Return the product of sizes."""
    return as_size(math.prod(sizes, start=sympy.Integer(1)))


def floor_div(a: Size, b: Size) -> Size:
    """Return a // b."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return as_size(size_internals.FloorDiv(a, b))


def modulo(a: Size, b: Size) -> Size:
    """Return a % b with the sign of b."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    return as_size(a - b * floor_div(a, b))


def same(a: Size, b: Size) -> bool:
    """Tell whether two sizes are equal for all inputs, as far as can be seen."""
    return a is b or bool(a == b)


class SizeValues:
    """Computes size expressions as rank-0 values of the graph, each once.

    Integer expressions are int64, the others float64.
    """

    def __init__(self, emitter: Emitter) -> None:
        self._e = emitter
        self._values: dict[Any, Value] = {}
        self._axes: dict[Any, tuple[Value, int, Callable[[Any], Size]]] = {}

    def define_lazily(
        self, symbol: sympy.Basic, tensor: Value, axis: int, solve: Callable[[Any], Size]
    ) -> None:
        """Let a symbol be read from a tensor's size: ``solve`` of the size of ``axis``."""
        self._axes.setdefault(symbol, (tensor, axis, solve))

    def define(self, symbol: sympy.Basic, value: Value) -> None:
        """Make ``value`` (rank 0) the value of a symbol."""
        self._values.setdefault(symbol, value)

    def knows(self, symbol: sympy.Basic) -> bool:
        """Tell whether a symbol has a value."""
        return symbol in self._values or symbol in self._axes

    def value(self, expression: Any) -> Value:
        """Return the rank-0 value of an int, float or sympy expression."""
        if isinstance(expression, bool):
            return self._e.constant(torch.tensor(expression))
        if isinstance(expression, (int, float)) or expression.is_number:
            return self._number(expression)
        held = self._values.get(expression)
        if held is None:
            held = self._values[expression] = self._compute(expression)
        return held

    def _number(self, number: Any) -> Value:
        if isinstance(number, int) or (isinstance(number, sympy.Basic) and number.is_Integer):
            return self._e.constant(torch.tensor(int(number), dtype=torch.int64))
        return self._e.constant(torch.tensor(float(number), dtype=torch.float64))

    def _reduce(self, op: str, args: tuple[Any, ...]) -> Value:
        real = not all(a.is_integer for a in args)
        values = [self._real(a) if real else self.value(a) for a in args]
        result = values[0]
        for other in values[1:]:
            result = self._e.node(op, result, other)
        return result

    def _real(self, expression: Any) -> Value:
        # Rounded, it is beyond the range of int64 at times, or NaN.
        rounding = _ROUNDING.get(type(expression).__name__)
        if rounding is not None:
            real = self._real(expression.args[0])
            rounded = self._e.node(rounding, real)
            # Python's // of what is infinite is NaN.
            return self._e.node("Add", rounded, self._e.node("Sub", real, real))
        return self._e.cast(self.value(expression), torch.float64)

    def _integer(self, value: Value) -> Value:
        return self._e.cast(value, torch.int64)

    def _compute(self, expression: Any) -> Value:
        e, args = self._e, expression.args
        name = type(expression).__name__
        if isinstance(expression, sympy.Symbol):
            return self._read(expression)
        if isinstance(expression, sympy.Add):
            return self._add(args)
        if isinstance(expression, sympy.Mul):
            return self._reduce("Mul", args)
        if isinstance(expression, sympy.Pow) or name == "PowByNatural":
            return self._power(*args)
        if name in ("Max", "Min"):
            return self._reduce(name, args)
        if name == "FloorDiv":
            return e.node("FloorDiv", self.value(args[0]), self.value(args[1]), domain="ortrain")
        if name == "CleanDiv":
            return e.node("Div", self.value(args[0]), self.value(args[1]))
        if name == "CeilDiv":
            negated = e.node("Neg", self.value(args[0]))
            return e.node("Neg", e.node("FloorDiv", negated, self.value(args[1]), domain="ortrain"))
        if name in ("Mod", "PythonMod"):
            return e.node("Mod", self.value(args[0]), self.value(args[1]), fmod=0)
        if name == "ModularIndexing":
            quotient = e.node(
                "FloorDiv", self.value(args[0]), self.value(args[1]), domain="ortrain"
            )
            return e.node("Mod", quotient, self.value(args[2]), fmod=0)
        return self._real_function(name, args)

    def _read(self, symbol: sympy.Symbol) -> Value:
        if symbol not in self._axes:
            raise CaptureError(f"size {symbol} depends on no input of the graph")
        tensor, axis, solve = self._axes[symbol]
        e = self._e
        size = e.node("Gather", e.node("Shape", tensor), e.scalar(axis, torch.int64), axis=0)
        whole = sympy.Dummy("size", integer=True)
        expression = solve(whole)
        if expression == whole:
            return size
        self._values[whole] = size
        return self.value(expression)

    def _real_function(self, name: str, args: tuple[Any, ...]) -> Value:
        e = self._e
        if name == "ToFloat":
            return self._real(args[0])
        if name in ("IntTrueDiv", "FloatTrueDiv"):
            return e.node("Div", self._real(args[0]), self._real(args[1]))
        if name in ("FloatSum", "FloatProduct"):
            op = "Add" if name == "FloatSum" else "Mul"
            return e.node(op, self._real(args[0]), self._real(args[1]))
        if name == "FloatPow":
            return e.node("Pow", self._real(args[0]), self._real(args[1]))
        if name == "TruncToInt":
            return self._integer(self._real(args[0]))
        if name in _ROUNDING:
            return self._integer(e.node(_ROUNDING[name], self._real(args[0])))
        if name in _UNARY:
            return e.node(_UNARY[name], self._real(args[0]))
        raise CaptureError(f"sizes are computed by {name}, which has no form in a graph")

    def _add(self, args: tuple[Any, ...]) -> Value:
        """Add terms; a term with a negative factor is subtracted, which keeps graphs readable."""
        positive = [a for a in args if not a.could_extract_minus_sign()]
        negative = [-a for a in args if a.could_extract_minus_sign()]
        if not positive:
            return self._reduce("Add", args)
        if not negative:
            return self._reduce("Add", tuple(positive))
        total = sympy.Add(*positive)
        left, right = self.value(total), self.value(sympy.Add(*negative))
        if left.dtype != right.dtype:
            left, right = (self._e.cast(v, torch.float64) for v in (left, right))
        return self._e.node("Sub", left, right)

    def _power(self, base: Any, exponent: Any) -> Value:
        if exponent.is_Integer and 1 < int(exponent) <= 8:
            return self._reduce("Mul", (base,) * int(exponent))
        if exponent.is_Integer and int(exponent) > 0:
            return self._e.node("Pow", self.value(base), self.value(exponent))
        return self._e.node("Pow", self._real(base), self._real(exponent))


def linear_root(size: Size) -> tuple[sympy.Symbol, Callable[[Any], Size]] | None:
    """Solve ``size = a * symbol + b`` for its symbol; None where size has another form."""
    if isinstance(size, int) or len(size.free_symbols) != 1:
        return None
    symbol = next(iter(size.free_symbols))
    polynomial = sympy.Poly(size, symbol) if size.is_polynomial(symbol) else None
    if polynomial is None or polynomial.degree() != 1:
        return None
    factor, offset = (int(c) for c in polynomial.all_coeffs())
    return symbol, lambda whole: floor_div(as_size(whole - offset), factor)
