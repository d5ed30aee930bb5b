# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a user's code reads that no guard compares: files, clocks, the environment, facts about a tensor's history."""

from __future__ import annotations

import dis
import types
import weakref

# Whatever object they are of.
_ATTRIBUTES = {
    "environ": "environment variables",
    "getenv": "environment variables",
    "read_text": "files",
    "read_bytes": "files",
    "monotonic": "a clock",
    "perf_counter": "a clock",
    "time_ns": "a clock",
    "getcontext": "the context of decimal numbers",
    "Decimal": "the context of decimal numbers",
    "grad_fn": "the history of a tensor",
    "_base": "the history of a tensor",
    "is_leaf": "the history of a tensor",
    "grad": "gradients",
    "default_generator": "PyTorch's generator",
}
_GLOBALS = {
    "open": "files",
    "input": "what is typed",
    "globals": "globals() by names that are made up",
    "eval": "names that are made up",
    "exec": "names that are made up",
    "Decimal": "the context of decimal numbers",
}
_OF_MODULES = {("time", "time"): "a clock", ("datetime", "now"): "a clock"}
_CLASS = "the class of a tensor"
_TENSOR_CLASSES = frozenset({"Tensor", "Parameter"})
# Of these Dynamo knows.
FOLLOWED_IN_PIECES = frozenset(
    {_CLASS, "the history of a tensor", "gradients", "PyTorch's generator"}
)

_known: weakref.WeakKeyDictionary[types.CodeType, str] = weakref.WeakKeyDictionary()


def outside_read(code: types.CodeType) -> str:
    """Return what a function reads that no guard compares; "" for nothing."""
    found = _known.get(code)
    if found is None:
        found = _known[code] = _found_in(code)
    return found


def _found_in(code: types.CodeType) -> str:
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("PUSH_NULL", "PRECALL")]
    for i, step in enumerate(steps):
        name = step.argval
        behind = [s.argval for s in steps[i + 1 : i + 7]]
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if name in _GLOBALS:
                return _GLOBALS[name]
            if behind and isinstance(behind[0], str) and (name, behind[0]) in _OF_MODULES:
                return _OF_MODULES[name, behind[0]]
            if name == "type" and not _TENSOR_CLASSES.isdisjoint(filter(_is_text, behind)):
                return _CLASS
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and name in _ATTRIBUTES:
            if name == "grad" and i > 0 and steps[i - 1].argval == "func":  # torch.func.grad
                continue
            return _ATTRIBUTES[name]
    return ""


def _is_text(value: object) -> bool:
    return isinstance(value, str)
