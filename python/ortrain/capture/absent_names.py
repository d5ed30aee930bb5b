# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What code asks for where it is not: an attribute of a class or a module that somebody may make later.

What is not there has no value that could be compared, so that it counts that it is not there.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from ortrain.capture.class_facts import may_get_attributes
from ortrain.capture.names_in_code import globals_of, modules_imported_by, names_imported_by
from ortrain.capture.source_files import file_of, is_standard

_ASK = frozenset({"getattr", "hasattr"})
# By which a module answers for what it does not have.
_ANSWERS = "__getattr__"
_NAMES_OF_TENSORS = frozenset(dir(torch.Tensor))


def names_of_classes(classes: Iterable[type]) -> Iterator[tuple[type, str, str]]:
    """Return variables that say which of the names that are read each class has itself."""
    return ((cls, " names", "names") for cls in classes if may_get_attributes(cls))


def asked_in_vain(
    code: types.CodeType, variables: dict[str, Any]
) -> Iterator[tuple[Any, str, str]]:
    """Return variables that say that modules do not have what code asks them for, nor tensors, and which are not loaded.

    Args:
      code: Of a function.
      variables: Its globals.
    """
    for name in names_imported_by(code, variables):
        if name not in sys.modules:
            yield sys.modules, name, "same"
    asked = asked_by(code)
    if not asked:
        return
    for name in sorted(asked - _NAMES_OF_TENSORS):
        yield torch.Tensor, name, "own"
    named = (variables.get(name) for name in globals_of(code))
    modules = [value for value in named if isinstance(value, types.ModuleType)]
    for module in (*modules, *modules_imported_by(code, variables)):
        for table in _tables_named(module, code.co_names):
            yield from absent_in(table, asked)


def absent_in(
    table: dict[str, Any], asked: Collection[str]
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Return variables that say that a module with these globals does not have what it is asked for."""
    return ((table, name, "same") for name in sorted({*asked, _ANSWERS} - table.keys()))


def members_of_protocols(code: types.CodeType, variables: dict[str, Any]) -> set[str]:
    """Return what ``isinstance`` asks an object for, whose class need not name the protocols that code names."""
    named = (variables.get(name) for name in globals_of(code))
    found: set[str] = set()
    for value in named:
        if isinstance(value, type) and getattr(value, "_is_protocol", False):
            for base in value.__mro__[:-1]:
                found.update(vars(base), vars(base).get("__annotations__", ()))
    return {name for name in found if not name.startswith("_")}


def asked_by(code: types.CodeType) -> set[str]:
    """Return the attributes that code may ask for where they are not."""
    asked = asked_by_text(code)
    if getattr(code, "co_exceptiontable", b" "):  # up to 3.10 nobody tells so quickly
        asked.update(filter(str.isidentifier, code.co_names))
    return asked


def asked_by_text(code: types.CodeType) -> set[str]:
    """Return the attributes that code may ask ``getattr`` or ``hasattr`` for."""
    if _ASK.isdisjoint(code.co_names):
        return set()
    return {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}


def _tables_named(
    module: types.ModuleType, names: Collection[str], depth: int = 2
) -> Iterator[dict[str, Any]]:
    """Return the globals of a module, and those of modules that it holds under some of the names."""
    root = module.__name__.partition(".")[0]
    if root == "ortrain":
        return
    table, file = vars(module), file_of(module)
    if not (is_standard(file) if file else root in sys.stdlib_module_names):
        yield table
    for name in sorted(table.keys() & names) if depth else ():
        if isinstance(table[name], types.ModuleType):
            yield from _tables_named(table[name], names, depth - 1)
