# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Code that Dynamo runs otherwise than Python, and says nothing: such a module does not run in pieces."""

from __future__ import annotations

import dis
import enum
import functools
import re
import sys
import types
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from ortrain.capture.error_handlers import handles_errors
from ortrain.capture.kept_changes import cells_of
from ortrain.capture.names_in_code import codes_in
from ortrain.capture.reachable_state import ReachableState, is_own
from ortrain.capture.torch_internals import TORCH_VERSION

# Methods that write to their tensor.
_WRITES = re.compile(r"[a-z]\w*[a-z0-9]_")
_WRITE_NOTHING = frozenset({"requires_grad_", "retain_grad_", "share_memory_", "pin_memory_"})
_REGISTERS_HOOKS = re.compile(r"register_\w*hook")
# Dynamo of 2.11 was seen to miss attributes of classes that a forward counts up, and hooks of layers
# that are exchanged between calls: nothing that changes can be left to its guards.
_MISSES_CHANGES = TORCH_VERSION < (2, 12)
# By what code makes a set, or changes one.
_MAKE_SETS = frozenset({"BUILD_SET", "SET_ADD", "SET_UPDATE"})
_SETS = frozenset({"set", "frozenset"})
_CHANGE_SETS = frozenset({"add", "discard", "remove", "pop", "update", "clear"})
# By these names code comes to globals, and to what functions have by default.
_OTHER_WAYS = frozenset(
    {"globals", "vars", "exec", "eval", "__kwdefaults__", "__defaults__", "__code__"}
)
# Methods that subclasses may have of their own.
_OPERATIONS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")
_OF_NUMBERS = (
    *(f"__{side}{name}__" for side in ("", "r") for name in _OPERATIONS),
    *("__neg__", "__abs__", "__bool__", "__int__", "__float__", "__index__", "__round__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
)
_OF_DICTIONARIES = ("__getitem__", "__iter__", "__contains__", "__len__", "keys", "items", "values")
# Dictionaries of transformers and diffusers, whose methods Dynamo knows.
_OUTPUTS = frozenset({"ModelOutput", "BaseOutput"})
_NOTHING = "CACHE", "NOP", "EXTENDED_ARG", "PRECALL", "PUSH_NULL", "RESUME"
_TRANSFORMS = frozenset({"func", "functorch", "vmap", "vjp", "jvp", "jacrev", "jacfwd", "hessian"})


def misread_by_dynamo(module: nn.Module, arguments: Any) -> str:
    """Return what code that a forward can reach does of which Dynamo is silently wrong; "" for nothing.

    Dynamo calls the function behind a cache, forgets the backward of an autograd function inside of torch.func,
    does not compare which of two objects a name stands for, does not see in one way what was written to a class or a
    module in another, nor what is written to a function, raises errors of its own past a handler of PyTorch's,
    half-way through, lets a checkpoint keep the parameters that PyTorch reads again, reads in the forward what a hook
    reads in the backward, goes through a set in the order in which items came, passes over methods of classes of
    numbers and dictionaries, and drops objects when it likes.

    Args:
      module: The module.
      arguments: What it is called with.
    """
    if _MISSES_CHANGES:
        return "what changes between calls, before PyTorch 2.12"
    reached = ReachableState(module, arguments, keeps_contents=False, tensors=False)
    if cached := reached.caches.names():
        return f"the cache of {cached[0]}"
    functions = any(
        issubclass(c, torch.autograd.Function) and c is not torch.autograd.Function
        for c in reached.classes
    )
    for cls in reached.classes:
        home = sys.modules.get(cls.__module__)
        if method := _method_passed_over(cls, home is None or is_own(home)):
            return f"{method} of {cls.__qualname__}"
    holds_sets = any(
        isinstance(value, set) and name != "_non_persistent_buffers_set"
        for layer in module.modules()
        for name, value in vars(layer).items()
    )
    names: set[str] = set()
    stored: set[str] = set()
    loaded: set[str] = set()
    for function in reached.functions:
        for code in codes_in(function.__code__):
            names.update(code.co_names)
            if not _OTHER_WAYS.isdisjoint(code.co_names):
                return f"globals or defaults in {function.__qualname__}"
            if _writes_to_classes(code, function):
                return (
                    f"what is written to a class, a module or a function in {function.__qualname__}"
                )
            for step in dis.get_instructions(code):
                if step.opname == "STORE_GLOBAL":
                    stored.add(step.argval)
                elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    loaded.add(step.argval)
            if functions and not _TRANSFORMS.isdisjoint(code.co_names):
                return "an autograd function inside of torch.func"
            if _has_sets(code, holds_sets):
                return f"the order of a set in {function.__qualname__}"
            if _compares_objects(code, function.__globals__):
                return f"which object is which in {function.__qualname__}"
            if handles_errors(code):
                return f"a handler of errors in {function.__qualname__}"
            if _has_hooks_that_read(code):
                return f"what a hook reads in the backward in {function.__qualname__}"
    if stored & loaded:
        return f"the global {min(stored & loaded)}"
    if _may_write(module, names) and ("checkpoint" in names or _holds_checkpoint(module, reached)):
        return "a checkpoint, and writes to tensors"
    return ""


def _may_write(module: nn.Module, names: set[str]) -> bool:
    """Tell whether code names a method that writes to its tensor, or a layer keeps statistics."""
    if any(_WRITES.fullmatch(name) and name not in _WRITE_NOTHING for name in names):
        return True
    # Their code is PyTorch's, whose names nobody has looked at.
    return any(
        layer.training and getattr(layer, "track_running_stats", False)
        for layer in module.modules()
    )


def _holds_checkpoint(module: nn.Module, reached: ReachableState) -> bool:
    """Tell whether a layer or a function has torch.utils.checkpoint, or a function of it, by any name."""
    held = [value for layer in module.modules() for value in vars(layer).values()]
    for function in reached.functions:
        held += [cell.cell_contents for cell in cells_of(function)]
        codes = codes_in(function.__code__)
        held += [function.__globals__.get(name) for code in codes for name in code.co_names]
    while held:
        value = held.pop()
        if isinstance(value, functools.partial):
            held.append(value.func)
        is_function = isinstance(value, types.FunctionType)
        if value is checkpoint or (is_function and value.__module__ == checkpoint.__name__):
            return True
    return False


def _has_hooks_that_read(code: types.CodeType) -> bool:
    """Tell whether a function may give a tensor a hook that reads more than its gradient.

    Dynamo reads that when the forward runs, PyTorch in the backward.
    """
    if not any(map(_REGISTERS_HOOKS.fullmatch, code.co_names)):
        return False
    inner = list(codes_in(code))[1:]
    globals_ = ("LOAD_GLOBAL", "LOAD_NAME")
    return not inner or any(
        part.co_freevars
        or part.co_argcount + part.co_kwonlyargcount > 1  # those behind the gradient have defaults
        or any(step.opname in globals_ for step in dis.get_instructions(part))
        for part in inner
    )


def _writes_to_classes(code: types.CodeType, function: types.FunctionType) -> bool:
    """Tell whether a function may write an attribute of a class, a module or a function."""
    named = {"type", "__class__"}.intersection(code.co_names)
    if "setattr" in code.co_names and (named or "cls" in code.co_varnames[:1]):
        return True
    steps = [s for s in dis.get_instructions(code) if s.opname not in _NOTHING]
    written = {s.argval for s in steps if s.opname in ("STORE_ATTR", "DELETE_ATTR")}
    if not written and "setattr" not in code.co_names:
        return False
    closed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    found: Any = None  # what the last step has loaded, as far as it is known
    known: dict[str, Any] = {"cls": object}  # local variables
    for i, step in enumerate(steps[:-1]):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found = type if step.argval == "type" else function.__globals__.get(step.argval)
            if "setattr" in code.co_names and _keeps_attributes(found) and found is not type:
                return True
        elif step.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            found = _content(closed.get(step.argval))
        elif step.opname == "LOAD_FAST":
            found = known.get(step.argval)
        elif step.opname == "LOAD_ATTR":
            if step.argval == "__class__":
                found = object
            else:
                is_looked_up = _keeps_attributes(found)
                found = vars(found).get(step.argval) if is_looked_up else None
        elif step.opname.startswith("CALL"):
            # Of one name, or of an attribute of it.
            found = object if any(_loads_type(s) for s in steps[max(i - 3, 0) : i]) else None
        elif step.opname not in ("COPY", "DUP_TOP"):
            found = None
        if not _keeps_attributes(found):
            continue
        behind = steps[i + 1]
        if behind.opname == "STORE_FAST":
            known[behind.argval] = found
        # As in `Net.steps += 1`, which loads the attribute of a copy first.
        is_copied = step.opname in ("COPY", "DUP_TOP") and behind.opname == "LOAD_ATTR"
        is_stored = behind.opname in ("STORE_ATTR", "DELETE_ATTR")
        if is_stored or (is_copied and behind.argval in written):
            return True
    return False


def _loads_type(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_GLOBAL" and step.argval == "type"


def _keeps_attributes(value: Any) -> bool:
    return isinstance(value, (type, types.ModuleType, types.FunctionType))


def _content(cell: types.CellType | None) -> Any:
    try:
        return None if cell is None else cell.cell_contents
    except ValueError:
        return None


def _has_sets(code: types.CodeType, holds_sets: bool) -> bool:
    """Tell whether a function makes a set, or may change one of the module; those for ``in`` alone are constants."""
    if not _SETS.isdisjoint(code.co_names):
        return True
    if holds_sets and not _CHANGE_SETS.isdisjoint(code.co_names):
        return True
    return any(step.opname in _MAKE_SETS for step in dis.get_instructions(code))


def _compares_objects(code: types.CodeType, variables: dict[str, Any]) -> bool:
    """Tell whether a function asks by ``is`` for an object that is no constant, class, function or dtype."""
    before: dis.Instruction | None = None
    for step in dis.get_instructions(code):
        if step.opname == "IS_OP" and not _is_fixed(before, variables):
            return True
        before = step
    return False


def _is_fixed(step: dis.Instruction | None, variables: dict[str, Any]) -> bool:
    if step is None or step.opname == "LOAD_CONST":
        return True
    if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        fixed = (type, types.FunctionType, types.BuiltinFunctionType, torch.dtype)
        return isinstance(variables.get(step.argval, type), fixed)
    return step.opname == "LOAD_ATTR" and isinstance(getattr(torch, step.argval, None), torch.dtype)


def _method_passed_over(cls: type, is_users: bool) -> str:
    """Return a method of a class that Dynamo does not call where Python does; "" for none."""
    names: tuple[str, ...] = ("__del__",) if is_users else ()
    if issubclass(cls, (int, float, complex)) and not issubclass(cls, enum.Enum):
        names += _OF_NUMBERS
    if issubclass(cls, dict):
        names += _OF_DICTIONARIES
    own = (getattr(cls, name, None) for name in names)
    found = (m for m in own if isinstance(m, types.FunctionType))
    return next((m.__name__ for m in found if m.__qualname__.split(".")[0] not in _OUTPUTS), "")
