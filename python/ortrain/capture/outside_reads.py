# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a user's code reads that no guard compares: files, clocks, the process, facts about a tensor's history."""

from __future__ import annotations

import builtins
import dis
import sys
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from ortrain.capture.process_facts import fact_named, fact_of
from ortrain.capture.source_files import is_installed

_ENVIRONMENT = "environment variables"
_MODULES = "modules by their names"
_COMPILES = "whether PyTorch compiles"
_WRITTEN = "how often a tensor was written to"
_CLASSES = "which classes there are"
_INFERENCE = "whether inference mode is on"
_UNWATCHED = "PyTorch's functions past what watches them"
_SHOWN = "what a tensor shows"
_MEMORY = "in which memory a tensor lies"
# Installed packages read variables as options of the process, and import parts of themselves when they are asked for.
OF_INSTALLED_PACKAGES = frozenset(
    {_ENVIRONMENT, _MODULES, _COMPILES, _INFERENCE, _WRITTEN, _CLASSES, _MEMORY}
)
# That PyTorch compiles they are told in each capture, and in no call.
READ_ONCE = OF_INSTALLED_PACKAGES - {_COMPILES}
# Whatever object they are of.
_ATTRIBUTES = {
    "environ": _ENVIRONMENT,
    "getenv": _ENVIRONMENT,
    "read_text": "files",
    "read_bytes": "files",
    "is_file": "files",
    "is_dir": "files",
    "exists": "files",
    "monotonic": "a clock",
    "perf_counter": "a clock",
    "time_ns": "a clock",
    "getcontext": "the context of decimal numbers",
    "Decimal": "the context of decimal numbers",
    "cache_info": "how often a cache was asked",
    "locked": "a lock",
    "isEnabledFor": "logging",
    "getEffectiveLevel": "logging",
    "import_module": _MODULES,
    "__subclasses__": _CLASSES,
    "grad_fn": "the history of a tensor",
    "_base": "the history of a tensor",
    "is_leaf": "the history of a tensor",
    "grad": "gradients",
    "default_generator": "PyTorch's generator",
    "is_inference": _INFERENCE,
    **dict.fromkeys(("DisableTorchFunction", "DisableTorchFunctionSubclass"), _UNWATCHED),
    "_version": _WRITTEN,
    **dict.fromkeys(
        (
            *("is_shared", "is_set_to", "is_neg", "untyped_storage", "_typed_storage", "_is_view"),
            "storage_offset",
        ),
        _MEMORY,
    ),
    "is_inference_mode_enabled": _INFERENCE,
    **dict.fromkeys(("is_compiling", "is_dynamo_compiling", "is_exporting"), _COMPILES),
}
# Of a tensor, but not of whatever else code may name so.
_OF_TENSORS = {
    "retains_grad": "the history of a tensor",
    "output_nr": "the history of a tensor",
    "_backward_hooks": "the hooks of a tensor",
    "_post_accumulate_grad_hooks": "the hooks of a tensor",
    "is_pinned": _MEMORY,
    "__repr__": _SHOWN,
    "__format__": _SHOWN,
}
_GLOBALS = {
    "open": "files",
    "input": "what is typed",
    "globals": "globals() by names that are made up",
    "eval": "names that are made up",
    "exec": "names that are made up",
    "__import__": _MODULES,
    "Decimal": "the context of decimal numbers",
    **dict.fromkeys(("DisableTorchFunction", "DisableTorchFunctionSubclass"), _UNWATCHED),
}
# Of these the name as a text is taken for the attribute, in functions that ask by texts.
_NAMED = frozenset({"grad", "grad_fn", "is_leaf", "_base", "storage_offset"})
_ASK_BY_TEXT = frozenset({"getattr", "hasattr", "attrgetter"})
_BY_TEXT = ("getattr", "hasattr", "vars", "dir")
_MADE_UP = "attributes of modules by names that are made up"
_CLASS = "the class of a tensor"
_TENSOR_CLASSES = frozenset({"Tensor", "Parameter"})
# Of these Dynamo knows.
FOLLOWED_IN_PIECES = frozenset(
    {_CLASS, _SHOWN, "the history of a tensor", "gradients", "PyTorch's generator"}
)
_LOADS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_LOADS_LOCAL = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")
_STORES_LOCAL = ("STORE_FAST", "STORE_DEREF", "STORE_NAME")
_LOADS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
# What a generator's state is asked for, and what may take it.
_ASKS_FOR_STATE = frozenset({"getstate", "get_rng_state", "get_state"})
_TAKES_STATE = frozenset({"setstate", "set_rng_state", "set_state"})
_NAMES = "__name__", "__qualname__", "__module__"
_NO_STEPS = ("PUSH_NULL", "PRECALL", "CACHE", "COPY_FREE_VARS", "RESUME")
_MISSING = object()

_known: weakref.WeakKeyDictionary[types.CodeType, str] = weakref.WeakKeyDictionary()


def told_by_tensors() -> dict[str, str]:
    """Return what no guard compares by the names of the attributes of tensors that tell it."""
    told = _ATTRIBUTES | _OF_TENSORS
    return {name: what for name, what in told.items() if hasattr(torch.Tensor, name)}


def is_told_by(attribute: str) -> bool:
    """Tell whether an attribute of that name may tell what no guard compares, whatever object it is of."""
    return not _ATTRIBUTES.keys().isdisjoint(attribute.split("."))


def outside_read(code: types.CodeType, variables: Mapping[str, Any] | None = None) -> str:
    """Return what a function reads that no guard compares; "" for nothing.

    Args:
      code: Of the function.
      variables: Its globals.
    """
    found = _known.get(code)
    if found is None:
        found = _known[code] = _Reading(code, variables or {}).found()
    return found


class _Reading:
    """One function's code, step by step."""

    def __init__(self, code: types.CodeType, variables: Mapping[str, Any]) -> None:
        self._steps = [s for s in dis.get_instructions(code) if s.opname not in _NO_STEPS]
        self._is_installed = is_installed(code.co_filename)
        self._asks_by_text = not (_ASK_BY_TEXT.isdisjoint(code.co_names) or self._is_installed)
        self._variables = variables
        self._imported = dict(self._imports())

    def found(self) -> str:
        for i, step in enumerate(self._steps):
            if step.opname in _LOADS_GLOBAL:
                what = self._global(i, step.argval)
            elif step.opname in _LOADS_LOCAL:
                value = self._imported.get(step.argval, _MISSING)
                what = "" if value is _MISSING else self._value(i, value)
            elif step.opname in _LOADS_ATTRIBUTE:
                what = self._attribute(i, step.argval)
            elif step.opname == "LOAD_CONST" and self._asks_by_text:
                behind = self._steps[i + 1].opname if i + 1 < len(self._steps) else ""
                is_name = isinstance(step.argval, str) and not behind.startswith("STORE")
                named = is_name and step.argval in _NAMED
                what = _ATTRIBUTES[step.argval] if named else ""
            else:
                what = ""
            if what and not self._only_puts_back(i):
                return what
        return ""

    def _only_puts_back(self, i: int) -> bool:
        """Tell whether the step at ``i`` begins ``state = getstate()``, and all that is done is ``setstate(state)``."""
        while self._steps[i].argval not in _ASKS_FOR_STATE:
            i += 1
            if i >= len(self._steps) or self._steps[i].opname not in _LOADS_ATTRIBUTE:
                return False
        call, store = (self._steps[i + 1 : i + 3] + [None, None])[:2]
        if call is None or call.opname != "CALL" or call.arg != 0:
            return False
        if store is None or store.opname != "STORE_FAST":
            return False
        for at, step in enumerate(self._steps):
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if step is store or "CONST" in step.opname or store.argval not in names:
                continue
            if step.opname not in _LOADS_LOCAL or not 0 < at < len(self._steps) - 1:
                return False
            before, behind = self._steps[at - 1], self._steps[at + 1]
            if before.argval not in _TAKES_STATE or behind.opname != "CALL" or behind.arg != 1:
                return False
        return True

    def _imports(self) -> Any:
        """Return the local names that imports in the function bind, and what they stand for."""
        module: Any = _MISSING
        taken: Any = _MISSING
        for i, step in enumerate(self._steps):
            if step.opname == "IMPORT_NAME":
                behind = self._steps[i + 1].opname if i + 1 < len(self._steps) else ""
                whole = behind == "IMPORT_FROM" or behind == "IMPORT_STAR"
                name = step.argval if whole else step.argval.partition(".")[0]
                module = taken = sys.modules.get(name, _MISSING)
            elif step.opname == "IMPORT_FROM":
                taken = getattr(module, step.argval, _MISSING)
            elif step.opname in _STORES_LOCAL and taken is not _MISSING:
                yield step.argval, taken
                taken = _MISSING

    def _global(self, i: int, name: str) -> str:
        if name == "type" and self._names_tensors(i):
            return _CLASS
        if name in self._variables:
            return self._value(i, self._variables[name])
        if name in _GLOBALS:
            return _GLOBALS[name]
        if name in _BY_TEXT:
            return self._by_text(i, name)
        return fact_of(getattr(builtins, name, None))

    def _names_tensors(self, i: int) -> bool:
        """Tell whether a class that is asked for at ``i`` may be compared with that of tensors."""
        # Packages ask for the classes of much in functions that use tensors too.
        steps = self._steps[i + 1 : i + 7]
        if not self._is_installed:
            steps = [] if self._is_for_readers(i) else self._steps
        return any(_names_a_class_of_tensors(step.argval) for step in steps)

    def _is_for_readers(self, i: int) -> bool:
        """Tell whether a class that is asked for at ``i`` is that of ``self``, called, or a part of a text."""
        before, steps = self._steps[i - 1] if i else None, self._steps[i:]
        if steps[0].argval == "__class__":
            behind = steps[1:]
            of_self = before is not None and before.argval == "self"
        else:
            calls = (j for j, step in enumerate(steps) if step.opname.startswith("CALL"))
            behind = steps[next(calls, len(steps)) + 1 :]
            of_self = len(steps) > 2 and steps[1].argval == "self" and steps[2].opname[:4] == "CALL"
        if of_self or not behind:
            return True
        if behind[0].argval in _NAMES:
            return not self._compares_name(i, behind[1:])
        return behind[0].opname.startswith(("FORMAT", "CONVERT"))

    def _compares_name(self, i: int, behind: list[dis.Instruction]) -> bool:
        """Tell whether the name of a class that is asked for at ``i`` is compared with that of a class of tensors.

        Args:
          i: A position among the steps.
          behind: What follows the name.
        """
        uses = [step.opname for step in behind[:2] if step.opname != "LOAD_CONST"]
        if not (uses and uses[0].startswith(("COMPARE", "CONTAINS"))):
            return False
        beside = (*self._steps[max(0, i - 2) : i], *behind[:1])
        return any(_names_a_class_of_tensors(step.argval) for step in beside)

    def _by_text(self, i: int, function: str) -> str:
        """Return what ``getattr(module, name)`` and the like read."""
        if i + 1 >= len(self._steps):
            return ""
        owner = self._steps[i + 1]
        value = self._variables.get(owner.argval) if owner.opname in _LOADS_GLOBAL else None
        if not isinstance(value, types.ModuleType):
            return ""
        name = self._steps[i + 2] if i + 2 < len(self._steps) else owner
        while name.opname in _LOADS_ATTRIBUTE:
            value = getattr(value, name.argval, None)
            if not isinstance(value, types.ModuleType):  # an object that the module holds
                return ""
            i += 1
            name = self._steps[i + 2] if i + 2 < len(self._steps) else owner
        if function in ("getattr", "hasattr") and name.opname == "LOAD_CONST":
            behind = self._steps[i + 3].opname if i + 3 < len(self._steps) else ""
            if "BINARY" not in behind and "LOAD_" not in behind:
                return fact_named(value, str(name.argval))
            if "LOAD_CONST" in behind:  # a default
                return fact_named(value, str(name.argval))
        return _MADE_UP

    def _value(self, i: int, value: Any) -> str:
        """Return what is read by way of an object that the step at ``i`` loads."""
        if value is None:
            return ""
        for step in self._steps[i + 1 :]:
            if step.opname not in _LOADS_ATTRIBUTE:
                break
            if isinstance(value, types.ModuleType) and step.argval == "__dict__":
                return _MADE_UP
            if what := fact_named(value, step.argval):
                return _ATTRIBUTES.get(step.argval, what)
            if not isinstance(value, types.ModuleType):
                return ""
            value = getattr(value, step.argval, None)
        return fact_of(value)

    def _attribute(self, i: int, name: str) -> str:
        if name == "__class__" and not self._is_installed and self._names_tensors(i):
            return _CLASS
        if name not in _ATTRIBUTES:
            return ""
        if name == "grad" and i > 0 and self._steps[i - 1].argval == "func":  # torch.func.grad
            return ""
        return _ATTRIBUTES[name]


def _names_a_class_of_tensors(value: object) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(map(_names_a_class_of_tensors, value))
    return isinstance(value, str) and value in _TENSOR_CLASSES
