# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Code that Dynamo runs otherwise than Python, and says nothing: such a module does not run in pieces."""

from __future__ import annotations

import dis
import types
from typing import Any

import torch
from torch import nn

from ortrain.capture.reachable_state import ReachableState

_TRANSFORMS = frozenset({"func", "functorch", "vmap", "vjp", "jvp", "jacrev", "jacfwd", "hessian"})


def misread_by_dynamo(module: nn.Module, arguments: Any) -> str:
    """Return what code that a forward can reach does of which Dynamo is silently wrong; "" for nothing.

    Dynamo calls the function behind a cache, forgets the backward of an autograd function inside of torch.func, and
    does not compare which of two objects a name stands for.

    Args:
      module: The module.
      arguments: What it is called with.
    """
    reached = ReachableState(module, arguments, keeps_contents=False, tensors=False)
    if names := reached.caches.names():
        return f"the cache of {names[0]}"
    functions = any(
        issubclass(c, torch.autograd.Function) and c is not torch.autograd.Function
        for c in reached.classes
    )
    for function in reached.functions:
        for code in _codes(function.__code__):
            if functions and not _TRANSFORMS.isdisjoint(code.co_names):
                return "an autograd function inside of torch.func"
            if _compares_objects(code, function.__globals__):
                return f"which object is which in {function.__qualname__}"
    return ""


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


def _codes(code: types.CodeType) -> list[types.CodeType]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [code, *(found for part in inner for found in _codes(part))]
