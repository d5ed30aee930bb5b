# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What the code of a function looks up outside of it: globals, modules that it imports."""

from __future__ import annotations

import dis
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from importlib.util import resolve_name
from typing import Any

_GLOBAL_STEPS = frozenset(
    f"{kind}_{what}"
    for kind in ("LOAD", "STORE", "DELETE")
    for what in ("GLOBAL", "NAME", "FROM_DICT_OR_GLOBALS")
)
_IMPORTS = dis.opmap["IMPORT_NAME"]
_known_globals: weakref.WeakKeyDictionary[types.CodeType, frozenset[str]] = (
    weakref.WeakKeyDictionary()
)


def named_with_place(code: types.CodeType) -> str:
    """Return the name of a function and where it stands, for people."""
    name = getattr(code, "co_qualname", code.co_name)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Return code and that of the functions that it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def modules_imported_by(
    code: types.CodeType, variables: Mapping[str, Any]
) -> Iterator[types.ModuleType]:
    """Return the modules that a function's own imports lead to, of those that are loaded.

    Args:
      code: Of the function.
      variables: Its globals, which say in which package it lies.
    """
    for name, taken in _imports_of(code, variables):
        if taken:
            yield from _loaded(f"{name}.{taken}")
            continue
        yield from _loaded(name)
        if "." in name:
            yield from _loaded(name.partition(".")[0])


def names_imported_by(code: types.CodeType, variables: Mapping[str, Any]) -> Iterator[str]:
    """Return the names of the modules that a function imports, loaded or not."""
    return (name for name, taken in _imports_of(code, variables) if name and not taken)


def _imports_of(code: types.CodeType, variables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the names of modules that a function imports, "" for one that cannot be told, and what it takes of them."""
    if _IMPORTS not in code.co_code[::2]:
        return
    constants: list[Any] = []
    package, name = variables.get("__package__") or "", ""
    if not package and isinstance(variables.get("__name__"), str):
        is_package = "__path__" in variables
        package = variables["__name__"] if is_package else variables["__name__"].rpartition(".")[0]
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants.append(step.argval)
        elif step.opname == "IMPORT_NAME":
            level = next((c for c in reversed(constants[-2:]) if type(c) is int), 0)
            name = step.argval
            if level:
                try:
                    name = resolve_name("." * level + name, package)
                except ImportError:  # which it raises, too
                    name = ""
            yield name, ""
        elif step.opname == "IMPORT_FROM":
            yield name, step.argval


def _loaded(name: str) -> Iterator[types.ModuleType]:
    module = sys.modules.get(name)
    if isinstance(module, types.ModuleType):
        yield module


def globals_of(code: types.CodeType) -> frozenset[str]:
    """Return the names that code looks up outside of functions, those of attributes aside."""
    names = _known_globals.get(code)
    if names is None:
        names = _known_globals[code] = frozenset(
            step.argval for step in dis.get_instructions(code) if step.opname in _GLOBAL_STEPS
        )
    return names
