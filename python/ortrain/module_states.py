# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The states that a module has been seen in, of all that a captured graph depends on."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ortrain import _core

# Parameters and buffers, None where a layer has registered none.
Tensors = tuple[torch.Tensor | None, ...]


class ModuleStates:
    """Gives each state of a module a number: its layers, attributes, hooks, kinds of tensors.

    For one thread at a time.

    Other parameters and buffers of the same kind, tied the same way, leave the state as it is.

    Attributes:
      module: The module.
      present: Number of the state at the last look.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.present = 0
        self._guard: Any = None  # the present state's
        # Of each state, the most recently seen last.
        self._guards: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._seen = 0

    @property
    def tensors(self) -> Tensors:
        """Parameters and buffers at the last look; graphs know them by their position here."""
        return self._guard.tensors

    def look(self) -> tuple[Tensors, bool]:
        """Look at the module again.

        Returns:
          Its tensors now, and whether its state is another one than before.
        """
        left = self._guard
        if left is not None:
            if left.holds():
                return left.tensors, False
            left.release_tensors()  # they may be replaced until the state comes back
        others = [(n, guard) for n, guard in self._guards.items() if guard is not left]
        number = next((n for n, guard in reversed(others) if guard.holds()), None)
        if number is None:
            self._seen += 1
            number = self._seen
            self._guards[number] = _core.ModuleGuard(list(self.module.modules()))
        self._guards.move_to_end(number)
        self.present, self._guard = number, self._guards[number]
        return self._guard.tensors, True

    def keep(self, numbers: Iterable[int]) -> None:
        """Forget all states, and the layers replaced since, but these and the present one."""
        kept = {self.present, *numbers}
        for number in [n for n in self._guards if n not in kept]:
            del self._guards[number]

    def positions(self) -> dict[str, int]:
        """Return where in `tensors` each parameter and buffer stands, by all of its names."""
        first: dict[int, int] = {}
        for position, tensor in enumerate(self.tensors):
            first.setdefault(id(tensor), position)
        named = itertools.chain(
            self.module.named_parameters(remove_duplicate=False),
            self.module.named_buffers(remove_duplicate=False),
        )
        return {name: first[id(tensor)] for name, tensor in named if id(tensor) in first}
