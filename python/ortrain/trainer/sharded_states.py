# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""States of the optimizer of which each process holds a share (ZeRO, stage 1).

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ortrain import _core
from ortrain.distributed import Processes
from ortrain.trainer.flat_layout import FlatLayout

_numbers = itertools.count()

Flats = dict[torch.dtype, torch.Tensor]


class ShardedStates:
    """The share of one process: it updates these elements of the parameters, and sends them.

    Shares are cut out of all parameters in a row, so that they have equal sizes whatever the
    parameters' are.

    Args:
      layout: Where the parameters lie in the row.
      kinds: Names of the states of a parameter.
      gradients: The vectors of all gradients. Parameters are sent through their memory.
      processes: Those that train together.

    Attributes:
      state: What the optimizer's graph works on: slices of parameters, gradients and states.
      slices: Those that this process updates: names, begins and ends.
      sum_norms_key: The external function by which LAMB learns the norms of whole parameters.
    """

    def __init__(
        self, layout: FlatLayout, kinds: Sequence[str], gradients: Flats, processes: Processes
    ) -> None:
        self._layout = layout
        self._processes = processes
        self._gradients = gradients
        self._parameters: dict[str, torch.Tensor] = {}
        self.state = _core.TrainingState()
        self.slices = layout.slices(processes.rank, processes.size)
        self.sum_norms_key = f"sum of norms {next(_numbers)}"
        places = {name: place for place, name in enumerate(layout.places)}
        owned = torch.tensor([places[name] for name, _, _ in self.slices], dtype=torch.int64)
        _add_sum_of_norms(self.sum_norms_key, owned, len(places), processes)
        weakref.finalize(self, _core.remove_external_function, self.sum_norms_key)
        self._states: dict[str, Flats] = {kind: {} for kind in kinds}
        for dtype in layout.sizes:
            begin, end = layout.share(dtype, processes.rank, processes.size)
            for flats in self._states.values():
                flats[dtype] = torch.zeros(end - begin, dtype=dtype)
        for name, view in layout.views(gradients).items():
            self.state.share_state(f"{name}:grad", view)
        for name, dtype, first, size in self._own_places():
            offset = layout.share(dtype, processes.rank, processes.size)[0]
            self.state.share_state(f"{name}:owned_grad", gradients[dtype][first : first + size])
            for kind, flats in self._states.items():
                begin = first - offset
                self.state.share_state(f"{name}:{kind}", flats[dtype][begin : begin + size])

    @property
    def bytes(self) -> int:
        """The bytes of the states that this process holds."""
        flats = [flat for kind in self._states.values() for flat in kind.values()]
        return sum(flat.numel() * flat.element_size() for flat in flats)

    def follow(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take the memory in which the parameters lie now; contiguous."""
        self._parameters = {name: parameters[name].reshape(-1) for name in self._layout.places}
        for name, begin, end in self.slices:
            self.state.share(name, self._parameters[name][begin:end])

    def send_parameters(self, trained: Sequence[str]) -> None:
        """Give all processes what each has updated. Overwrites the gradients.

        Args:
          trained: The parameters of the step that was made, in all processes; others stay.
        """
        processes, names = self._processes, frozenset(trained)
        for name, begin, end, staged in self._staged(processes.rank, names):
            staged.copy_(self._parameters[name][begin:end])
        for rank in range(processes.size):
            for dtype, flat in self._gradients.items():
                first, last = self._layout.share(dtype, rank, processes.size)
                processes.broadcast([flat[first:last]], rank)
            if rank != processes.rank:
                for name, begin, end, staged in self._staged(rank, names):
                    self._parameters[name][begin:end].copy_(staged)

    def join_norms(self, trained: Sequence[str]) -> None:
        """Take part in the sum of norms where no slice of this process is trained.

        Args:
          trained: The parameters of the step that was made.
        """
        if not any(name in trained for name, _, _ in self.slices):
            self._processes.all_reduce(
                torch.zeros(len(self._layout.places), 2, dtype=torch.float64)
            )

    def gather(self, *, on_all: bool) -> dict[str, torch.Tensor]:
        """Return the whole states by target, in the parameters' shapes; all processes call it.

        Args:
          on_all: In all processes; otherwise the first alone has them, others get nothing.
        """
        processes, result = self._processes, {}
        wanted = on_all or processes.rank == 0
        for kind, flats in self._states.items():
            whole = self._layout.zeros() if wanted else {}
            for dtype, own in flats.items():
                for rank in range(processes.size):
                    begin, end = self._layout.share(dtype, rank, processes.size)
                    part = own if rank == processes.rank else None
                    if wanted:
                        part = whole[dtype][begin:end]
                        if rank == processes.rank:
                            part.copy_(own)
                    if on_all and part is not None:
                        processes.broadcast([part], rank)
                    elif part is not None:
                        processes.send_to(0, part, rank)
            if wanted:
                views = self._layout.views(whole)
                result.update({f"{name}:{kind}": view for name, view in views.items()})
        return result

    def take(
        self, whole: Mapping[str, torch.Tensor], steps: int, updates: Mapping[str, int]
    ) -> None:
        """Keep this process's share of whole states, by target; those that are absent are zero.

        Args:
          whole: The states.
          steps: Of the optimizer so far.
          updates: How many of them updated each parameter; of others none has.
        """
        self.state.steps = steps
        self.state.updates = {name: updates.get(name, 0) for name in self._layout.places}
        for flats in self._states.values():
            for flat in flats.values():
                flat.zero_()
        own = self.state.optimizer
        for name, begin, end in self.slices:
            for kind in self._states:
                target = f"{name}:{kind}"
                if target in whole:
                    own[target].copy_(whole[target].reshape(-1)[begin:end])

    def _own_places(self) -> Iterator[tuple[str, torch.dtype, int, int]]:
        """Yield name, type, begin in the vector and size of each slice of this process."""
        for name, begin, end in self.slices:
            dtype, first, _ = self._layout.places[name]
            yield name, dtype, first + begin, end - begin

    def _staged(
        self, rank: int, names: frozenset[str]
    ) -> Iterator[tuple[str, int, int, torch.Tensor]]:
        """Yield slices of a process with the memory that they are sent through."""
        for name, begin, end in self._layout.slices(rank, self._processes.size):
            if name not in names:
                continue
            dtype, first, _ = self._layout.places[name]
            yield name, begin, end, self._gradients[dtype][first + begin : first + end]


def _add_sum_of_norms(key: str, owned: torch.Tensor, count: int, processes: Processes) -> None:
    """Make the external function that adds up the squares of the norms of slices.

    Args:
      key: Its name.
      owned: The parameters that the slices of this process belong to, by number.
      count: How many parameters there are.
      processes: Those that have the other slices.
    """

    def forward(operands: list[Any], results: list[Any], tracked: list[int]) -> None:
        del tracked
        numbers, norms = operands
        parameters = owned[numbers]
        whole = torch.zeros(count, 2, dtype=torch.float64)
        whole[parameters] = norms
        processes.all_reduce(whole)
        results[0].copy_(whole[parameters])

    def backward(*_: Any) -> None:
        raise AssertionError("an optimizer's step has no gradient")

    _core.add_external_function(key, forward, backward)
