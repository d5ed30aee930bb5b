# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What the numbers of a trace answer the user's code, which takes them for Python's."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from ortrain.capture.number_functions import class_stood_for, functions_answer, stands_for_numpy
from ortrain.capture.size_internals import DataDependentError

# These ask for the numbers of a trace by their own names.
_KNOW_TRACES = frozenset({"torch", "sympy", "mpmath", "ortrain"}) | sys.stdlib_module_names
# Abstract classes, functools.singledispatch, protocols.
_ASK_FOR_OTHERS = frozenset({"abc", "functools", "typing"})
# int64 holds the square of any number that is live, but no higher power.
_HIGHEST_POWER = 2


# From the name of each module that has asked to whether it is a user's: code of PyTorch asks a hundred thousand times.
_askers: dict[Any, bool] = {}


def _is_users(frame: Any) -> bool:
    name = frame.f_globals.get("__name__")
    known = _askers.get(name)
    if known is None:
        known = _askers[name] = (name or "").partition(".")[0] not in _KNOW_TRACES
    return known


def _class_told(kind: type) -> Callable[[Any, str], Any]:
    original = kind.__getattribute__

    def attribute(number: Any, name: str) -> Any:
        if name == "__class__":
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") in _ASK_FOR_OTHERS:
                frame = frame.f_back
            if _is_users(frame):
                return class_stood_for(number)
        return original(number, name)

    return attribute


def _answering(kind: type, name: str) -> Callable[..., Any]:
    """Return a method that answers the user's code as the number itself does, which fixes it."""
    original = getattr(kind, name, None)

    def answer(number: Any, *args: Any) -> Any:
        if original is None or _is_users(sys._getframe(1)):
            value = class_stood_for(number)
            return getattr(value, name)(value(number), *args)
        return original(number, *args)

    return answer


def _attribute_of(number: Any, name: str) -> Any:
    value = class_stood_for(number)
    if _is_users(sys._getframe(1)) and hasattr(value, name):
        return getattr(value(number), name)
    raise AttributeError(f"'{type(number).__name__}' object has no attribute '{name}'")


def _power(original: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    """Return an int's power, for the number itself where int64 may not hold it."""

    def power(number: Any, other: Any) -> Any:
        exact = type(other) is not int or (not reflected and 0 <= other <= _HIGHEST_POWER)
        if exact or not _is_users(sys._getframe(1)):
            return original(number, other)
        value = class_stood_for(number)(int(number))
        return other**value if reflected else value**other

    return power


def _division(original: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    """Return a division, which holds for the numbers by which Python divides only."""

    def divide(number: Any, other: Any) -> Any:
        by = number if reflected else other
        asks = type(by) in (torch.SymInt, torch.SymFloat) and _is_users(sys._getframe(1))
        # Live numbers are not 0.0, and a float that comes out of a tensor divides as there.
        if asks and not by.node.expr.is_symbol and by == 0:
            raise ZeroDivisionError("division by zero")
        return original(number, other)

    return divide


def _floor_division(
    original: Callable[..., Any], reflected: bool, value: type
) -> Callable[..., Any]:
    """Return ``//`` of floats, for the number itself: Python rounds the exact quotient, a graph the rounded one.

    They are the same where the divisor is a power of two.
    """

    def divide(number: Any, other: Any) -> Any:
        has_floats = value is float or isinstance(other, (float, torch.SymFloat))
        by = None if reflected else other
        is_exact = type(by) in (int, float) and by and math.frexp(by)[0] in (0.5, -0.5)
        if not has_floats or is_exact or not _is_users(sys._getframe(1)):
            return original(number, other)
        fixed = class_stood_for(number)(value(number))
        return other // fixed if reflected else fixed // other

    return divide


def _rounding(original: Callable[..., Any]) -> Callable[..., Any]:
    def rounded(number: Any, digits: int | None = None) -> Any:
        if stands_for_numpy(number):
            return round(class_stood_for(number)(number), digits)
        if digits is not None and digits < 0:
            return round(int(number), digits)
        return original(number) if digits is None else original(number, digits)

    return rounded


def _noting(original: Callable[..., Any], refused: list[Exception]) -> Callable[..., Any]:
    """Return a conversion that takes note where it has no answer: the user's code may handle that."""

    @functools.wraps(original)
    def convert(number: Any) -> Any:
        try:
            return original(number)
        except DataDependentError as error:
            if _is_users(sys._getframe(1)):
                refused.append(error)
            raise

    return convert


@contextlib.contextmanager
def numbers_answer() -> Iterator[list[Exception]]:
    """Let the numbers of a trace answer the user's code as the numbers that they stand for.

    Their class is ``int`` or ``float``; what a trace cannot follow, such as their text, fixes them.

    Yields:
      Takes the errors of questions that only values answer, from which the user's code may go on.
    """
    refused: list[Exception] = []
    with contextlib.ExitStack() as stack:
        # Within the others, which ask who calls them.
        stack.enter_context(functions_answer(_is_users))

        def put(kind: type, name: str, made: Any) -> None:
            stack.enter_context(mock.patch.object(kind, name, made, create=True))

        for kind, value in ((torch.SymInt, int), (torch.SymFloat, float)):
            for name in ("__str__", "__repr__", "__format__"):
                put(kind, name, _answering(kind, name))
            put(kind, "__getattr__", _attribute_of)
            for name in ("truediv", "floordiv", "mod"):
                for place, reflected in ((f"__{name}__", False), (f"__r{name}__", True)):
                    put(kind, place, _division(getattr(kind, place), reflected))
            for place, reflected in (("__floordiv__", False), ("__rfloordiv__", True)):
                put(kind, place, _floor_division(getattr(kind, place), reflected, value))
            # isinstance and match ask for it as well.
            put(kind, "__getattribute__", _class_told(kind))
        ints: Any = torch.SymInt
        put(ints, "__pow__", _power(ints.__pow__, False))
        put(ints, "__rpow__", _power(ints.__rpow__, True))
        for kind in (torch.SymInt, torch.SymFloat):
            put(kind, "__round__", _rounding(kind.__round__))  # type: ignore[attr-defined]
        for kind, names in (
            (torch.SymBool, ("__bool__",)),
            (torch.SymInt, ("__bool__", "__int__", "__index__")),
            (torch.SymFloat, ("__bool__", "__int__", "__float__")),
        ):
            for name in names:
                if name in vars(kind):
                    put(kind, name, _noting(getattr(kind, name), refused))
        yield refused
