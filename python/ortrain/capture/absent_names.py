# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What code asks for where it is not: an attribute of a class or a module that somebody may make later.

What is not there has no value that could be compared, so that it counts that it is not there.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ortrain.capture.class_facts import may_get_attributes
from ortrain.capture.names_in_code import globals_of, modules_imported_by
from ortrain.capture.source_files import is_standard

_ASK = frozenset({"getattr", "hasattr"})
# What these have is theirs to say; that functions in there are replaced is seen elsewhere.
_LEFT_OUT = "torch", "ortrain"


def names_of_classes(classes: Iterable[type]) -> Iterator[tuple[type, str, str]]:
    """Return variables that say which of the names that are read each class has itself."""
    return ((cls, " names", "names") for cls in classes if may_get_attributes(cls))


def asked_in_vain(
    code: types.CodeType, variables: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Return variables that say that modules do not have what code asks them for.

    Args:
      code: Of a function.
      variables: Its globals.
    """
    asked = asked_by(code)
    if not asked:
        return
    named = (variables.get(name) for name in globals_of(code))
    modules = [value for value in named if isinstance(value, types.ModuleType)]
    for module in (*modules, *modules_imported_by(code, variables)):
        for table in _tables_named(module, code.co_names):
            for name in sorted(asked - table.keys()):
                yield table, name, "same"


def asked_by(code: types.CodeType) -> set[str]:
    """Return the attributes that code may ask for where they are not."""
    asked: set[str] = set()
    if not _ASK.isdisjoint(code.co_names):
        asked.update(text for text in code.co_consts if isinstance(text, str))
    if getattr(code, "co_exceptiontable", b" "):  # up to 3.10 nobody tells so quickly
        asked.update(code.co_names)
    return {name for name in asked if name.isidentifier()}


def _tables_named(
    module: types.ModuleType, names: Collection[str], depth: int = 2
) -> Iterator[dict[str, Any]]:
    """Return the globals of a module, and those of modules that it holds under some of the names."""
    if module.__name__.partition(".")[0] in _LEFT_OUT:
        return
    table = vars(module)
    if not is_standard(getattr(module, "__file__", None) or "<frozen>"):
        yield table
    for name in sorted(table.keys() & names) if depth else ():
        if isinstance(table[name], types.ModuleType):
            yield from _tables_named(table[name], names, depth - 1)
