# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The functions of PyTorch that a forward calls, one after the other, to compare one run with another."""

from __future__ import annotations

import dis
import functools
import inspect
import re
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ortrain.capture.captured import environment_key

# Known by their names.
_NAMED = torch.dtype, torch.device, torch.layout, torch.memory_format
# Of functions that write to what they are given: add_, aten::add_, __iadd__.
_WRITES = re.compile(r"(?<!_)_(?![\w_])|\b__i(?!nvert|nt|ndex)\w+__")


class CallPath(TorchFunctionMode):
    """Records while it is entered.

    Tensors that calls return go by the order in which they come, others by what they are.

    Args:
      before: A run that was recorded before. As long as the calls are the same, and wrote to nothing
        there, they return what they returned there, and nothing is computed again.

    Attributes:
      steps: Of each call that returns tensors, or nothing, the function and what it was given, in order.
    """

    def __init__(self, before: CallPath | None = None) -> None:
        super().__init__()
        self.steps: list[tuple[Any, ...]] = []
        self._results: list[Any] = []  # of the steps
        self._writes = False
        self._before = before if before is not None and not before._writes else None
        self._numbers: dict[int, int] = {}  # of tensors that calls returned, by address
        self._given: set[int] = set()
        self._alive: list[Any] = []  # keeps addresses from being used again

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # it runs this function by its own interpreter
            return func(*args, **kwargs)
        # With an address, of what lives as long as its module or class. A trace watches some methods.
        name = repr(inspect.unwrap(func))
        step = (name, _modes(), *self._described((args, kwargs)))
        if self._before is not None and self._before._step(len(self.steps)) == step:
            result = self._before._results[len(self.steps)]
            if result is None:
                func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        leaves = pytree.tree_leaves(result)
        if result is None or any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            self.steps.append(step)
            self._results.append(result)
            self._writes = self._writes or _may_write(name, func, kwargs, step, result)
        for leaf in leaves:
            # A call may return what it was given.
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._given:
                self._numbers.setdefault(id(leaf), len(self._numbers))
                self._alive.append(leaf)
        return result

    def _step(self, index: int) -> tuple[Any, ...] | None:
        return self.steps[index] if index < len(self.steps) else None

    def end(self, results: Any, structure: Any) -> None:
        """Add what the forward returns: its tensors, and how they are put together."""
        self.steps.append(("results", structure, *self._described(results)))

    def _described(self, value: Any) -> tuple[Any, ...]:
        leaves, structure = pytree.tree_flatten(value)
        return (str(structure), *map(self._leaf, leaves))

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in self._numbers:
                return "made", self._numbers[id(leaf)]
            self._given.add(id(leaf))
            self._alive.append(leaf)
            return "given", id(leaf)
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return "size", str(leaf)
        if isinstance(leaf, slice):
            return "slice", *map(self._leaf, (leaf.start, leaf.stop, leaf.step))
        if leaf is None or isinstance(leaf, (bool, int, float, complex, str, *_NAMED)):
            return type(leaf).__name__, repr(leaf)
        self._alive.append(leaf)
        if callable(leaf) and not isinstance(leaf, type):  # what it calls is not seen
            return "function", object()
        return type(leaf).__qualname__, id(leaf)


def _modes() -> tuple[Any, ...]:
    """Return what else decides about the result of a call."""
    return (
        environment_key(),
        torch.is_inference_mode_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )


def _may_write(name: str, func: Any, kwargs: dict[str, Any], step: Any, result: Any) -> bool:
    """Tell whether a call can have changed a tensor that it was given."""
    if isinstance(func, torch._ops.HigherOrderOperator) or isinstance(result, (list, dict)):
        return True
    if isinstance(func, torch._ops.OpOverloadPacket):
        overloads = [getattr(func, name) for name in func.overloads()]
    else:
        overloads = [func] if isinstance(func, torch._ops.OpOverload) else []
    if any(overload._schema.is_mutable for overload in overloads):
        return True
    if result is None and any(
        leaf[0] in ("made", "given")
        for leaf in step[3:]  # behind name, modes and structure
    ):
        return True
    return bool(_WRITES.search(name) or kwargs.get("out") is not None or kwargs.get("inplace"))


def stores_attributes(module: nn.Module) -> bool:
    """Tell whether the forward of a layer has an assignment to an attribute."""
    kinds = {type(part) for part in module.modules()}
    return any(_stores(getattr(inspect.unwrap(kind.forward), "__code__", None)) for kind in kinds)


@functools.lru_cache(maxsize=4096)
def _stores(code: CodeType | None) -> bool:
    return code is not None and any(i.opname == "STORE_ATTR" for i in dis.get_instructions(code))
