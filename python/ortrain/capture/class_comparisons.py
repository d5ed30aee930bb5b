# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Code that may ask for the very class of a number: in a trace sizes and live numbers have classes of their own."""

from __future__ import annotations

import dis
import itertools
import sys
import types
import weakref
from collections.abc import Sequence

from ortrain.capture.source_files import is_installed

_OF_NUMPY = frozenset({"float64", "double", "int64", "int_", "longlong", "intp"})
_NUMBERS = frozenset({"int", "float", "bool", "Number", "Integral", "Real", *_OF_NUMPY})
_NAMES = frozenset({"__name__", "__qualname__"})
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_TEXTS = frozenset({"str", "repr", "print"})
_NOTHING = ("CACHE", "NOP", "EXTENDED_ARG")
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
    steps = [s for s in dis.get_instructions(code) if s.opname not in _NOTHING]
    calls = [i for i, s in enumerate(steps) if s.argval == "type" and _is_callee(s)]
    if not calls:
        return False
    loaded = {s.argval for s in steps if s.opname in _LOADS}
    loaded |= {
        s.argval
        for before, s in itertools.pairwise(steps)
        if s.argval in _OF_NUMPY and before.argval in ("np", "numpy")
    }
    if not _NUMBERS.isdisjoint((*loaded, *code.co_consts)):
        return True
    # Packages ask for the classes of much; those that mean numbers name them.
    return not is_installed(code.co_filename) and any(_matters(steps, i) for i in calls)


def _is_callee(step: dis.Instruction) -> bool:
    """Tell whether a global is loaded to be called; Python 3.10 does not say."""
    if step.opname == "LOAD_GLOBAL" and sys.version_info >= (3, 11):
        return bool((step.arg or 0) & 1)
    return step.opname in _LOADS


def _matters(steps: Sequence[dis.Instruction], start: int) -> bool:
    """Tell whether more may come of a class than a text for a reader, an object of it, or another class's no.

    Args:
      steps: Of a function.
      start: Where it loads ``type``.
    """
    before = steps[start - 1] if start else None
    if steps[start + 1].argval == "self" or (before is not None and before.argval in _TEXTS):
        return False
    depth = 0
    for i, step in enumerate(steps[start:], start):
        if i > start and (step.opcode in dis.hasjrel or step.opcode in dis.hasjabs):
            return True
        depth += dis.stack_effect(step.opcode, step.arg)
        if step.opname.startswith("CALL") and depth == 1:
            break
    else:
        return True
    behind = list(steps[i + 1 :])
    while behind and behind[0].argval in _NAMES:
        del behind[0]
    if not behind or behind[0].opname.startswith("FORMAT"):
        return not behind
    is_called = "PUSH_NULL" in (steps[start - 1].opname, behind[0].opname)
    if is_called or behind[0].opname not in _LOADS:
        return not is_called
    rest = itertools.dropwhile(lambda s: s.opname in ("LOAD_ATTR", *_LOADS), behind)
    return next(rest).opname not in ("IS_OP", "COMPARE_OP")
