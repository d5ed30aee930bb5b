# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Sizes and numbers of traces as formulas, and the conditions on them.

As in `torch_internals`, a release of PyTorch that moves one of these names is met here. Checked
against 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.fx.experimental import _config as _symbolic_config
from torch.fx.experimental import symbolic_shapes
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ortrain.capture.errors import CaptureError

# Raised where control flow depends on the values of a tensor.
DataDependentError: type[Exception] = symbolic_shapes.GuardOnDataDependentSymNode

FloorDiv = sympy_functions.FloorDiv
Mod = sympy_functions.Mod


def guards_code(program: torch.export.ExportedProgram) -> list[str]:
    """Return the conditions on input sizes under which an exported program holds, as Python text."""
    code = getattr(program, "_guards_code", None)
    if code is None:
        raise CaptureError(f"PyTorch {torch.__version__} does not tell the guards of an export")
    return list(code)


@contextlib.contextmanager
def flexible_sizes() -> Iterator[None]:
    """Let sizes 0 and 1 be dynamic, and record conditions as guards, not as nodes of the graph."""
    options: dict[str, bool] = {}
    if hasattr(_symbolic_config, "backed_size_oblivious"):
        options["backed_size_oblivious"] = True
    with _symbolic_config.patch(**options) if options else contextlib.nullcontext():
        yield


def size_expression(size: Any) -> int | sympy.Expr:
    """Return a size as an int, or as a sympy expression of the symbols of the graph."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def size_function(expression: int | sympy.Expr, symbols: list[sympy.Symbol]) -> Callable[..., int]:
    """Return a function of the values of the symbols, as Python ints, that gives the expression's."""
    formula = sympy.sympify(expression)

    def value(*values: int) -> int:
        known = dict(zip(symbols, values, strict=True))
        return int(sympy_interp(PythonReferenceAnalysis, known, formula))

    return value


def number_expression(number: Any) -> int | float | bool | sympy.Basic:
    """Return a SymInt, SymFloat or SymBool as a Python number or a sympy expression."""
    if isinstance(number, (bool, int, float)):
        return number
    expression = number.node.expr
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    if expression.is_Integer:
        return int(expression)
    if expression.is_Float or expression.is_Rational:
        return float(expression)
    return expression


def size_hint(size: Any) -> int:
    """Return the size seen in the sample for an int or SymInt that comes from an input."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise CaptureError(f"size {size} depends on values, not on sizes of the inputs")
    return int(hint)


def has_unbacked_symbols(error: BaseException) -> bool:
    """Tell whether an export failed because control flow depends on a tensor's values."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DataDependentError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
