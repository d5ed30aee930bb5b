# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Conditions on input sizes under which a captured graph holds."""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortrain.capture.errors import SizeConditionError

Sizes = Sequence[Sequence[int]]
Term = Callable[[Sizes], Any]

# Of what * and ** and << give: eight of the largest sizes, multiplied.
_MOST_BITS = 512
_LIMIT = 1 << _MOST_BITS
_LARGEST = 1 << 63  # no integer of a text is larger

# Of a kept graph: its conditions, their characters and terms together, the terms inside of each other. Those of
# transformers and residual networks come to 10, 500, 250 and 15; at these bounds a load takes a second.
_MOST_CONDITIONS = 4096
_MOST_CHARACTERS = 1 << 19
_MOST_TERMS = 1 << 16
_MOST_DEPTH = 256

# What says that a term has no value. The caller's stack may be nearly full.
_NO_VALUE = (ArithmeticError, IndexError, RecursionError, TypeError, ValueError)


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
        """Tell whether the graph is right for inputs of these sizes (one list per input).

        A condition that has no value for them, such as a division by zero, does not hold.
        """
        try:
            return all(term(sizes) for term in self.terms)
        except _NO_VALUE:
            return False

    def violated(self, sizes: Sizes) -> list[str]:
        """Return the conditions that do not hold."""
        return [t for t, term in zip(self.text, self.terms, strict=True) if not _holds(term, sizes)]

    def check(self, sizes: Sizes) -> None:
        """See that each condition may have a value for inputs of these ranks, which are not those of a capture.

        Raises:
          SizeConditionError: One names an axis or an operand that there is not.
        """
        for text, term in zip(self.text, self.terms, strict=True):
            try:
                term(sizes)
            except (IndexError, TypeError) as error:
                raise _refusal(text) from error
            except _NO_VALUE:
                pass  # of these sizes; others may have one


def compile_guards(
    conditions: Sequence[str],
    names: Sequence[str],
    static: Sequence[tuple[int, int, int]],
    *,
    kept: bool = False,
) -> Guards:
    """Compile the conditions of an export.

    Args:
      conditions: Python expressions over ``L['name'].size()[axis]``.
      names: Names of the user inputs, in the order in which sizes will be given.
      static: (input, axis, size) of each dimension that the graph fixes.
      kept: Whether anybody may have written them: what takes long is refused too.

    Raises:
      SizeConditionError: A condition reads something else than sizes of inputs.
    """
    index = {name: i for i, name in enumerate(names)}
    fixed = [f"L['{names[i]}'].size()[{axis}] == {size}" for i, axis, size in static]
    every = tuple(dict.fromkeys([*fixed, *conditions]))
    length = sum(map(len, every))
    if kept and (len(every) > _MOST_CONDITIONS or length > _MOST_CHARACTERS):
        raise SizeConditionError(
            f"the captured graph depends on {len(every)} conditions of {length} characters"
        )
    compiler = _Compiler(index, *((_MOST_TERMS, _MOST_DEPTH) if kept else (sys.maxsize,) * 2))
    terms: dict[str, Term] = {}
    for condition in every:
        text = re.sub(r"L\['(\w+)'\]", r"\1", condition)
        terms[text] = compiler.compile(condition)
    return Guards(tuple(terms), tuple(terms.values()), every)


def sizes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Size]:
    """Return the sizes that ``Guards.holds`` takes."""
    return [tensor.shape for tensor in tensors]


def _holds(term: Term, sizes: Sizes) -> bool:
    try:
        return bool(term(sizes))
    except _NO_VALUE:
        return False


def _refusal(condition: str) -> SizeConditionError:
    shown = condition if len(condition) <= 1000 else f"{condition[:1000]}..."
    return SizeConditionError(f"the captured graph depends on the condition {shown}")


# A term is an int, a float or a bool. No int is long: products, powers and shifts end at the limit, what floats become
# has 1024 bits, and no other operator gives more than a bit beyond its operands.


def _product(a: Any, b: Any) -> Any:
    result = a * b
    if -_LIMIT < result < _LIMIT or type(result) is float:
        return result
    raise OverflowError("a product of too many bits")


def _power(a: Any, b: Any) -> Any:
    # Before it is computed, by what it has at least.
    if type(a) is not float and type(b) is not float and (a.bit_length() - 1) * b > _MOST_BITS:
        raise OverflowError("a power of too many bits")
    result = a**b
    if isinstance(result, complex):
        raise ValueError("a root of a negative number")
    return _product(result, 1)


def _shifted(a: Any, b: Any) -> Any:
    if b > _MOST_BITS:
        raise OverflowError("a shift by too many bits")
    return _product(a << b, 1)


def _rounded(value: Any, *digits: Any) -> Any:
    if digits and abs(digits[0]) > _MOST_BITS:  # of an int, that power of 10 is computed
        raise OverflowError("too many digits")
    return round(value, *digits)


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _product,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.LShift: _shifted,
    ast.RShift: operator.rshift,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
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
    "round": _rounded,
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
    if axis >= len(sizes):
        raise IndexError(axis)
    return math.prod(sizes[axis + 1 :])


class _Compiler:
    """Turns conditions into nested functions of the sizes; nothing is evaluated as code.

    Args:
      index: Positions of the inputs by name.
      terms: How many terms the conditions may have together.
      depth: How many may lie inside of each other.
    """

    def __init__(self, index: Mapping[str, int], terms: int, depth: int) -> None:
        self._index = index
        self._terms = terms
        self._depth = depth
        self._condition = ""

    def compile(self, condition: str) -> Term:
        self._condition = condition
        try:
            return self._term(ast.parse(condition, mode="eval").body, 1)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._refuse() from error  # no Python, or nested too deep for its parser

    def _refuse(self) -> SizeConditionError:
        return _refusal(self._condition)

    def _term(self, node: ast.expr, depth: int) -> Term:
        self._terms -= 1
        if self._terms < 0 or depth > self._depth:
            raise self._refuse()
        depth += 1
        if isinstance(node, ast.Constant):
            value = node.value
            if type(value) not in (bool, int, float) or (type(value) is int and value > _LARGEST):
                raise self._refuse()
            return lambda _: value
        if isinstance(node, ast.BoolOp):
            return _joined(isinstance(node.op, ast.Or), [self._term(v, depth) for v in node.values])
        if isinstance(node, ast.Compare):
            return self._comparison(node, depth)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            function, left, right = (
                _BINARY[type(node.op)],
                self._term(node.left, depth),
                self._term(node.right, depth),
            )
            return lambda s: function(left(s), right(s))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            unary, operand = _UNARY[type(node.op)], self._term(node.operand, depth)
            return lambda s: unary(operand(s))
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.Subscript):
            return self._size(node)
        raise self._refuse()

    def _comparison(self, node: ast.Compare, depth: int) -> Term:
        first, *others = [self._term(v, depth) for v in (node.left, *node.comparators)]
        if any(type(op) not in _COMPARISONS for op in node.ops):
            raise self._refuse()
        steps = [(_COMPARISONS[type(op)], b) for op, b in zip(node.ops, others, strict=True)]
        if len(steps) == 1:
            ((compare, right),) = steps
            return lambda s: compare(first(s), right(s))

        def chain(s: Sizes) -> bool:  # each operand once
            left = first(s)
            for compare, operand in steps:
                right = operand(s)
                if not compare(left, right):
                    return False
                left = right
            return True

        return chain

    def _call(self, node: ast.Call, depth: int) -> Term:
        if node.keywords:
            raise self._refuse()
        if isinstance(node.func, ast.Attribute) and node.func.attr == "storage_offset":
            if node.args or self._input(node.func.value) is None:
                raise self._refuse()
            return lambda _: 0  # the engine hands dense tensors on
        function = _CALLS.get(_dotted(node.func))
        if function is None:
            raise self._refuse()
        arguments = [self._term(a, depth) for a in node.args]
        if len(arguments) == 1:
            (argument,) = arguments
            return lambda s: function(argument(s))
        return lambda s: function(*[a(s) for a in arguments])

    def _size(self, node: ast.Subscript) -> Term:
        axis = node.slice.value if isinstance(node.slice, ast.Constant) else None
        call = node.value
        if (
            type(axis) is not int
            or not isinstance(call, ast.Call)
            or call.args
            or call.keywords
            or not isinstance(call.func, ast.Attribute)
            or call.func.attr not in ("size", "stride")
        ):
            raise self._refuse()
        index = self._input(call.func.value)
        if index is None:
            raise self._refuse()
        if call.func.attr == "size":
            return lambda s: s[index][axis]
        # The engine hands dense tensors on, so strides are functions of sizes.
        return lambda s: _dense_stride(s[index], axis)

    def _input(self, node: ast.expr) -> int | None:
        """Return the position of the input that ``L['name']`` is, or None."""
        if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
            return None
        name = node.slice.value
        known = isinstance(name, str) and _dotted(node.value) == "L"
        return self._index.get(name) if known else None


def _joined(is_or: bool, parts: Sequence[Term]) -> Term:
    """Return what Python's ``or`` or ``and`` gives, a value of the parts."""

    def joined(s: Sizes) -> Any:
        value: Any = None
        for part in parts:
            value = part(s)
            if bool(value) is is_or:
                break
        return value

    return joined


def _dotted(node: ast.expr) -> str:
    """Return a name with a module before it at most, "" for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
