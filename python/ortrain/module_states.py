# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The states that a module has been seen in, of all that a captured graph depends on."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ortrain import _core
from ortrain.capture.library_reads import Variable

# Parameters and buffers, None where a layer has registered none.
Tensors = tuple[torch.Tensor | None, ...]


class ModuleStates:
    """Gives each state of a module a number: its layers, attributes, hooks, kinds of tensors.

    For one thread at a time.

    Other parameters and buffers of the same kind, tied the same way, leave the state as it is, and so do attributes
    that no forward has read.

    Args:
      module: The module.
      beside: Layers that count too, without those below them.

    Attributes:
      module: The module.
      present: Number of the state at the last look.
    """

    def __init__(self, module: nn.Module, beside: Sequence[nn.Module] = ()) -> None:
        self.module = module
        self._beside = tuple(beside)
        self.present = 0
        self._guard: Any = None  # the present state's
        # Names of attributes that forwards read; None before the first one, where all count.
        self._names: frozenset[str] | None = None
        self._all_count = False
        # Outside of the module, by owner and name.
        self._variables: dict[tuple[int, str], Variable] = {}
        # Inputs of graphs that are in no table of a layer, by address.
        self._outside: dict[int, torch.Tensor] = {}
        # Of each state, the most recently seen last.
        self._guards: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._seen = 0

    @property
    def tensors(self) -> Tensors:
        """Parameters and buffers at the last look; graphs know them by their position here."""
        return self._guard.tensors

    @property
    def names(self) -> frozenset[str] | None:
        """Names of the attributes that forwards have read; None where any may count."""
        return self._names

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
            number = self._new_state()
        self._guards.move_to_end(number)
        self.present, self._guard = number, self._guards[number]
        return self._guard.tensors, True

    def _new_state(self) -> int:
        self._seen += 1
        self._guards[self._seen] = _core.ModuleGuard(
            [*self.module.modules(), *self._beside],
            self._names,
            list(self._variables.values()),
            list(self._outside.values()),
        )
        return self._seen

    def reads(
        self,
        names: frozenset[str] | None,
        variables: Iterable[Variable] = (),
        outside: Iterable[torch.Tensor] = (),
    ) -> None:
        """Take note of what a forward has read in the present state, which may get another number.

        Args:
          names: Of attributes; None where it may have read any.
          variables: Outside of the module, as `ReachableState` gives them; they are kept alive.
          outside: Tensors that a graph takes as inputs wherever they are held: of those the kind counts.
        """
        known = len(self._variables) + len(self._outside)
        self._outside.update({id(tensor): tensor for tensor in outside})
        for variable in variables:  # one that counts as a whole does so wherever it counts at all
            key = id(variable[0]), variable[1]
            self._variables[key] = min(variable, self._variables.get(key, variable), key=len)
        self._all_count |= names is None
        self._names = None if self._all_count else (self._names or frozenset()) | names
        looked_at = self._guard.names
        if self._names is None or looked_at is None:
            enough = self._names is looked_at
        else:
            enough = self._names <= looked_at
        if not enough or len(self._variables) + len(self._outside) > known:
            del self._guards[self.present]
            self.present = self._new_state()
            self._guard = self._guards[self.present]

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
