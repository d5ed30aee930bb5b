# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Conditions on input sizes under which a captured graph holds."""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortrain.capture.errors import SizeConditionError

Sizes = Sequence[Sequence[int]]
Term = Callable[[Sizes], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Guards:
    """A predicate of the sizes of the user inputs.

    Attributes:
      text: The conditions, readable; ``x.size()[0]`` is dimension 0 of input x.
      terms: The same, compiled.
      conditions: The same as ``compile_guards`` takes them.
    """

    text: tuple[str, ...]
    terms: tuple[Term, ...]
    conditions: tuple[str, ...] = ()

    def holds(self, sizes: Sizes) -> bool:
        """Tell whether the graph is right for inputs of these sizes (one list per input)."""
        return all(term(sizes) for term in self.terms)

    def violated(self, sizes: Sizes) -> list[str]:
        """Return the conditions that do not hold."""
        return [t for t, term in zip(self.text, self.terms, strict=True) if not term(sizes)]


def compile_guards(
    conditions: Sequence[str], names: Sequence[str], static: Sequence[tuple[int, int, int]]
) -> Guards:
    """Compile the conditions of an export.

    Args:
      conditions: Python expressions over ``L['name'].size()[axis]``.
      names: Names of the user inputs, in the order in which sizes will be given.
      static: (input, axis, size) of each dimension that the graph fixes.

    Raises:
      SizeConditionError: A condition reads something else than sizes of inputs.
    """
    index = {name: i for i, name in enumerate(names)}
    fixed = [f"L['{names[i]}'].size()[{axis}] == {size}" for i, axis, size in static]
    every = tuple(dict.fromkeys([*fixed, *conditions]))
    terms: dict[str, Term] = {}
    for condition in every:
        text = re.sub(r"L\['(\w+)'\]", r"\1", condition)
        terms[text] = _Compiler(index, condition).compile()
    return Guards(tuple(terms), tuple(terms.values()), every)


def sizes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Size]:
    """Return the sizes that ``Guards.holds`` takes."""
    return [tensor.shape for tensor in tensors]


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "int": int,
    "float": float,
    "round": round,
    "torch.sym_float": float,
    "torch.sym_int": int,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "math.sqrt": math.sqrt,
    "math.pow": math.pow,
    "math.log": math.log,
    "math.exp": math.exp,
}


def _dense_stride(sizes: Sequence[int], axis: int) -> int:
    return math.prod(sizes[axis + 1 :])


class _Compiler:
    """Turns one condition into nested functions of the sizes; nothing is evaluated as code."""

    def __init__(self, index: Mapping[str, int], condition: str) -> None:
        self._index = index
        self._condition = condition

    def compile(self) -> Term:
        return self._term(ast.parse(self._condition, mode="eval").body)

    def _refuse(self) -> SizeConditionError:
        return SizeConditionError(f"the captured graph depends on the condition {self._condition}")

    def _term(self, node: ast.expr) -> Term:
        if isinstance(node, ast.Constant):
            value = node.value
            return lambda _: value
        if isinstance(node, ast.BoolOp):
            parts = [self._term(v) for v in node.values]
            if isinstance(node.op, ast.And):
                return lambda s: all(p(s) for p in parts)
            return lambda s: any(p(s) for p in parts)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            function, left, right = (
                _BINARY[type(node.op)],
                self._term(node.left),
                self._term(node.right),
            )
            return lambda s: function(left(s), right(s))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            unary, operand = _UNARY[type(node.op)], self._term(node.operand)
            return lambda s: unary(operand(s))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            return self._size(node)
        raise self._refuse()

    def _comparison(self, node: ast.Compare) -> Term:
        operands = [self._term(v) for v in (node.left, *node.comparators)]
        if any(type(op) not in _BINARY for op in node.ops):
            raise self._refuse()
        steps = [
            (_BINARY[type(op)], a, b)
            for op, a, b in zip(node.ops, operands, operands[1:], strict=False)
        ]
        if len(steps) == 1:
            ((compare, left, right),) = steps
            return lambda s: compare(left(s), right(s))
        return lambda s: all(f(a(s), b(s)) for f, a, b in steps)

    def _call(self, node: ast.Call) -> Term:
        name = ast.unparse(node.func)
        if name.endswith(".storage_offset"):
            return lambda _: 0  # the engine hands dense tensors on
        function = _CALLS.get(name)
        if function is None or node.keywords:
            raise self._refuse()
        arguments = [self._term(a) for a in node.args]
        return lambda s: function(*(a(s) for a in arguments))

    def _size(self, node: ast.Subscript) -> Term:
        match = re.fullmatch(r"L\['(\w+)'\]\.(size|stride)\(\)\[(\d+)\]", ast.unparse(node))
        if match is None or match[1] not in self._index:
            raise self._refuse()
        index, axis = self._index[match[1]], int(match[3])
        if match[2] == "size":
            return lambda s: s[index][axis]
        # The engine hands dense tensors on, so strides are functions of sizes.
        return lambda s: _dense_stride(s[index], axis)
