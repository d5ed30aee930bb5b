# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The functions of PyTorch that a forward calls, one after the other, to compare one run with another."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

# Known by their names.
_NAMED = torch.dtype, torch.device, torch.layout, torch.memory_format


class CallPath(TorchFunctionMode):
    """Records while it is entered.

    Tensors that calls return go by the order in which they come, others by what they are.

    Attributes:
      steps: Of each call that returns tensors, or nothing, the function and what it was given, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, ...]] = []
        self._numbers: dict[int, int] = {}  # of tensors that calls returned, by address
        self._given: set[int] = set()
        self._alive: list[Any] = []  # keeps addresses from being used again

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        step = (resolve_name(func) or repr(func), *self._described((args, kwargs)))
        result = func(*args, **kwargs)
        leaves = pytree.tree_leaves(result)
        if result is None or any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            self.steps.append(step)
        for leaf in leaves:
            # A call may return what it was given.
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._given:
                self._numbers.setdefault(id(leaf), len(self._numbers))
                self._alive.append(leaf)
        return result

    def end(self, results: Any) -> None:
        """Add what the forward returns."""
        self.steps.append(("results", *self._described(results)))

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
        return type(leaf).__qualname__, id(leaf)
