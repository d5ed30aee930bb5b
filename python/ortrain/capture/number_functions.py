# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What functions of Python and NumPy give the user's code for the numbers of a trace: the kind that they always give."""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

_LIVE = torch.SymInt, torch.SymFloat
# NumPy's functions that are Python's operators.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "negative": operator.neg,
}
# Of ints they and what comes of them have 64 bits.
_MOST = 1 << 31
# Which give floats of floats, where Python's give ints.
_ROUNDING: dict[str, Callable[[Any], Any]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "trunc": math.trunc,
}
# An attribute of the numbers of a trace that stand for NumPy's.
_OF_NUMPY = "_ortrain_of_numpy"
_UNARY = "neg", "pos", "abs"
_OF_BITS = "lshift", "rshift", "and", "or", "xor"
_MOST_AXES = 64
_MAKE_TENSORS = torch.tensor, torch.as_tensor, torch.asarray
_ARITHMETIC = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow"


def class_stood_for(number: Any) -> type:
    """Return the class of the number that one of a trace stands for."""
    is_int = isinstance(number, torch.SymInt)
    if _OF_NUMPY not in object.__getattribute__(number, "__dict__"):
        return int if is_int else float
    import numpy

    return numpy.int64 if is_int else numpy.float64


def stands_for_numpy(value: Any) -> bool:
    """Tell whether a value is a number of a trace that stands for one of NumPy's."""
    return isinstance(value, _LIVE) and class_stood_for(value).__module__ == "numpy"


def _of_numpy(result: Any) -> Any:
    """Return a number as NumPy's: what has come of one of these."""
    if isinstance(result, _LIVE):
        made = type(result)(result.node)
        setattr(made, _OF_NUMPY, True)
        return made
    if type(result) in (int, float):
        import numpy

        return (numpy.int64 if type(result) is int else numpy.float64)(result)
    return result


@contextlib.contextmanager
def functions_answer(is_users: Callable[[Any], bool]) -> Iterator[None]:
    """Let functions of Python and NumPy give the user's code what they give for the numbers that those of a trace stand for.

    An export has put others in the place of three of them: ``max`` and ``min`` that compare elements and take the kind
    of either operand, a ``math.pow`` that gives ints.

    Args:
      is_users: Tells whether a frame is one of the user's code.
    """
    # Here, in an export: it brings all of Dynamo with it.
    from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler

    with contextlib.ExitStack() as stack:

        def put(home: Any, name: str, made: Any) -> None:
            stack.enter_context(mock.patch.object(home, name, made, create=True))

        put(
            _NonStrictTorchFunctionHandler,
            "_override",
            _with_dtypes_of_numpy(_NonStrictTorchFunctionHandler._override),
        )
        for name in ("max", "min"):
            put(builtins, name, _extreme(getattr(builtins, name), is_users))
        put(math, "pow", _float_power(math.pow, is_users))
        for kind in _LIVE:
            put(kind, "__array_ufunc__", _answer)
            put(kind, "__array__", _as_array)
            for name in _UNARY:
                if hasattr(kind, place := f"__{name}__"):
                    put(kind, place, _changed(getattr(kind, place)))
            for names, watched in ((_ARITHMETIC, _met_by), (_OF_BITS, _shifted)):
                for name in names:
                    function = getattr(operator, f"{name}_" if name in ("and", "or") else name)
                    for place, is_reflected in ((f"__{name}__", False), (f"__r{name}__", True)):
                        if hasattr(kind, place):
                            put(kind, place, watched(getattr(kind, place), function, is_reflected))
        yield


def _extreme(replaced: Callable[..., Any], is_users: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return ``max`` or ``min``, which compare and give one of their operands.

    Args:
      replaced: What an export has in its place, which knows Python's.
    """
    python = getattr(replaced, "keywords", {}).get("real_callable", replaced)

    def extreme(*args: Any, **kwargs: Any) -> Any:
        # PyTorch's own code asks for those of plain numbers in nearly all calls.
        if len(args) == 2 and type(args[0]) is int and type(args[1]) is int and not kwargs:
            return python(*args)
        return (python if is_users(sys._getframe(1)) else replaced)(*args, **kwargs)

    return extreme


def _float_power(
    replaced: Callable[..., Any], is_users: Callable[[Any], bool]
) -> Callable[..., Any]:
    def power(base: Any, exponent: Any, /) -> Any:
        if not is_users(sys._getframe(1)):
            return replaced(base, exponent)
        if not isinstance(base, _LIVE) and not isinstance(exponent, _LIVE):
            return _POWER(base, exponent)
        return _float_of(base) ** _float_of(exponent)

    return power


_POWER = math.pow


def _float_of(number: Any) -> Any:
    return torch.sym_float(number) if isinstance(number, _LIVE) else float(number)


def _answer(_: Any, function: Any, method: str, *operands: Any, **options: Any) -> Any:
    """Return what a function of NumPy gives for numbers of a trace."""
    name = function.__name__
    is_plain = method == "__call__" and not options and all(map(_is_number, operands))
    if is_plain and name in _OPERATORS:
        return _of_numpy(_OPERATORS[name](*map(_of_python, operands)))
    if is_plain and name in _ROUNDING and isinstance(operands[0], torch.SymFloat):
        return _of_numpy(torch.sym_float(_ROUNDING[name](operands[0])))
    return getattr(function, method)(*map(_fixed, operands), **options)


def _met_by(
    original: Callable[..., Any], function: Callable[..., Any], is_reflected: bool
) -> Callable[..., Any]:
    """Return an operator of a number of a trace, which may meet a number of NumPy's.

    Args:
      original: The operator's method.
      function: The operator itself.
      is_reflected: Whether the number stands behind it.
    """

    @functools.wraps(original)
    def operate(number: Any, other: Any, *more: Any) -> Any:
        if type(other).__module__ == "numpy":
            if not _is_number(other):  # an array, or a number of fewer bits
                value = _fixed(number)
                return function(other, value) if is_reflected else function(value, other)
            return _of_numpy(original(number, _of_python(other), *more))
        result = original(number, other, *more)
        if stands_for_numpy(number) or stands_for_numpy(other):
            return _of_numpy(result)
        return result

    return operate


def _changed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator of a single number of a trace."""

    @functools.wraps(original)
    def operate(number: Any) -> Any:
        result = original(number)
        return _of_numpy(result) if stands_for_numpy(number) else result

    return operate


def _shifted(
    original: Callable[..., Any], function: Callable[..., Any], is_reflected: bool
) -> Callable[..., Any]:
    """Return an operator of bits, for the numbers themselves where NumPy's are among them."""

    @functools.wraps(original)
    def operate(number: Any, other: Any) -> Any:
        if stands_for_numpy(number) or stands_for_numpy(other) or type(other).__module__ == "numpy":
            value, other = _fixed(number), _fixed(other)
            return function(other, value) if is_reflected else function(value, other)
        return original(number, other)

    return operate


def _with_dtypes_of_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what looks at each call of a function of PyTorch: of NumPy's floats tensors are made in float64."""

    @functools.wraps(original)
    def override(handler: Any, function: Any, args: Any, kwargs: Any) -> Any:
        if function in _MAKE_TENSORS and kwargs.get("dtype") is None:
            data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
            if len(args) < 2 and _has_float_of_numpy(data):
                kept = {k: v for k, v in kwargs.items() if k in ("device", "requires_grad")}
                return original(handler, torch.tensor, (data,), {**kept, "dtype": torch.float64})
        return original(handler, function, args, kwargs)

    return override


def _is_number(value: Any) -> bool:
    """Tell whether an operand is a number of Python, of a trace, or one of NumPy's that computes like Python's."""
    if isinstance(value, (*_LIVE, float)):
        return True
    return (type(value) is int or type(value).__name__ == "int64") and abs(value) < _MOST


def _of_python(number: Any) -> Any:
    return number.item() if type(number).__module__ == "numpy" else number


def _fixed(value: Any) -> Any:
    if not isinstance(value, _LIVE):
        return value
    return class_stood_for(value)(int(value) if isinstance(value, torch.SymInt) else float(value))


def _as_array(number: Any, dtype: Any = None, copy: Any = None) -> Any:
    """Return an array without axes, as NumPy makes of the number, which this fixes."""
    import numpy

    return numpy.asarray(_fixed(number), dtype)


def _has_float_of_numpy(data: Any) -> bool:
    """Tell whether there is a number of a trace in data, and one of NumPy's floats, or one that stands for such."""
    numbers = list(_numbers_in(data))
    return any(isinstance(each, _LIVE) for each in numbers) and any(
        stands_for_numpy(each) if isinstance(each, torch.SymFloat) else _is_float_of_numpy(each)
        for each in numbers
    )


def _numbers_in(data: Any, depth: int = 0) -> Iterator[Any]:
    is_sequence = hasattr(type(data), "__len__") and hasattr(type(data), "__getitem__")
    if not is_sequence or isinstance(data, (torch.Tensor, str, bytes)) or depth > _MOST_AXES:
        yield data
    elif type(data).__module__ != "numpy":
        for i in range(len(data)):
            yield from _numbers_in(data[i], depth + 1)


def _is_float_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "float64"
