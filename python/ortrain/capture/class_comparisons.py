# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Code that may ask for the very class of a number: in a trace sizes and live numbers have classes of their own."""

from __future__ import annotations

import dis
import types
import weakref
from collections.abc import Sequence

_NUMBERS = frozenset({"int", "float", "bool", "Number", "Integral", "Real"})
_NAMES = frozenset({"__name__", "__qualname__"})
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
# What looks a class up in a table.
_LOOKUPS = ("CONTAINS_OP", "BINARY_SUBSCR", "BINARY_OP")
_known: weakref.WeakKeyDictionary[types.CodeType, bool] = weakref.WeakKeyDictionary()


def compares_classes_of_numbers(code: types.CodeType) -> bool:
    """Tell whether a function may compare the class of a number with others.

    ``isinstance`` and ``__class__`` are answered as for numbers, ``type()`` by Python itself.
    """
    if "type" not in code.co_names:
        return False
    found = _known.get(code)
    if found is None:
        found = _known[code] = _compares(code)
    return found


def _compares(code: types.CodeType) -> bool:
    steps = list(dis.get_instructions(code))
    loaded = {s.argval for s in steps if s.opname in _LOADS}
    if "type" not in loaded:
        return False
    if not _NUMBERS.isdisjoint((*loaded, *code.co_consts)):
        return True
    return any(
        step.argval == "type" and step.opname in _LOADS and _matters(steps[i:])
        for i, step in enumerate(steps)
    )


def _matters(steps: Sequence[dis.Instruction]) -> bool:
    """Tell whether more than a text for a reader comes of a class or its name.

    Args:
      steps: From the loading of ``type`` on.
    """
    depth, called, named = 0, False, False
    for i, step in enumerate(steps):
        if i and (step.opcode in dis.hasjrel or step.opcode in dis.hasjabs):
            return False
        depth += dis.stack_effect(step.opcode, step.arg)
        if called and step.opname.startswith("FORMAT"):
            return False
        if called and (depth < 1 or (depth == 1 and step.opname in _LOOKUPS)):
            return named or step.opname in _LOOKUPS
        named = named or (called and depth == 1 and step.argval in _NAMES)
        called = called or (step.opname.startswith("CALL") and depth == 1)
    return False
