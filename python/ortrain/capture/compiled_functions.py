# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions in C that code calls, which may keep what nobody can look at."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from ortrain.capture.names_in_code import globals_of, modules_imported_by
from ortrain.capture.opaque_objects import OF_CYTHON

# What these compute depends on their arguments, or is told by others.
_KNOWN = sys.stdlib_module_names | {"torch", "numpy", "ortrain", "functorch", "torchgen"}


def compiled_functions(code: types.CodeType, variables: Mapping[str, Any]) -> Iterator[str]:
    """Return the functions in C, neither Python's nor PyTorch's nor NumPy's, that code names, by module and name.

    Args:
      code: Of a function.
      variables: Its globals.
    """
    held = [variables[name] for name in globals_of(code) if name in variables]
    modules = [value for value in held if isinstance(value, types.ModuleType)]
    modules += modules_imported_by(code, variables)
    for value in (*held, *(vars(m)[n] for m in modules for n in code.co_names if n in vars(m))):
        if _is_compiled(value) and (home := _home_of(value)).partition(".")[0] not in _KNOWN:
            yield f"{home}.{value.__name__}"


def _is_compiled(value: Any) -> bool:
    return isinstance(value, types.BuiltinFunctionType) or type(value).__name__ == OF_CYTHON


def _home_of(function: Any) -> str:
    home = function.__module__
    if home is None:  # a method of an object
        owner = getattr(function, "__self__", None)
        home = type(owner).__module__ if owner is not None else "builtins"
    return str(home)
