# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of the outputs of a graph, as gradients of the results that views make of these."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ortrain.capture.result_views import Step
from ortrain.capture.signature import Container, OutputTree, Slot, Tree
from ortrain.entry import Entry


class UnknownSeedsError(Exception):
    """A gradient of a graph's output is none of its results'."""


class Seeds:
    """Takes gradients of a graph's outputs to PyTorch's results.

    Where several results are views of one output, each element goes to the first of them. That gives
    all else the gradients that it has, whatever the results' own were.

    Args:
      entry: The graph.
      tensors: The arguments of the call, flat, for their sizes.
      count: Number of results that are tensors.
    """

    def __init__(self, entry: Entry, tensors: Sequence[torch.Tensor], count: int) -> None:
        self._count = count
        slots = _slots(entry.captured.output_tree)
        self._is_known = len(slots) == count  # else two of them are one tensor
        views = entry.captured.views
        self._of: dict[int, list[tuple[int, tuple[Step, ...]]]] = {}
        if views is None:
            for place, slot in enumerate(slots):
                self._of[slot] = [(place, ())]
            return
        steps = views.steps(tensors)
        for place, slot in enumerate(slots):
            kind, where = views.views[slot].source
            if kind == "output":  # of others no gradient reaches the graph
                self._of.setdefault(where, []).append((place, steps[slot]))

    def of(self, incoming: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return a gradient per result; None for none.

        Args:
          incoming: Per output of the graph.

        Raises:
          UnknownSeedsError: They are not those of results.
        """
        if not self._is_known:
            raise UnknownSeedsError("a result is there more than once")
        seeds: list[torch.Tensor | None] = [None] * self._count
        for output, gradient in enumerate(incoming):
            if gradient is None:
                continue
            results = self._of.get(output, [])
            if len(results) == 1 and not results[0][1]:
                seeds[results[0][0]] = gradient
            else:
                self._share_out(gradient, results, seeds)
        return seeds

    def _share_out(
        self,
        gradient: torch.Tensor,
        results: Sequence[tuple[int, tuple[Step, ...]]],
        seeds: list[torch.Tensor | None],
    ) -> None:
        numbers = torch.arange(gradient.numel(), device=gradient.device).reshape(gradient.shape)
        values = gradient.reshape(-1)
        is_taken = torch.zeros_like(values, dtype=torch.bool)
        for place, steps in results:
            seen = numbers
            try:
                for step in steps:
                    seen = step(seen)
            except RuntimeError as error:  # it looks at memory as another type
                raise UnknownSeedsError(
                    f"a result is a view that cannot be followed: {error}"
                ) from error
            flat = seen.reshape(-1)
            # Of elements that an expanded view shows several times, the last one counts.
            last = torch.empty_like(numbers.reshape(-1)).fill_(-1)
            own = torch.arange(flat.numel(), device=flat.device)
            last = last.scatter_reduce(0, flat, own, "amax")
            counts = (last[flat] == own) & ~is_taken[flat]
            is_taken[flat] = True
            seeds[place] = torch.where(counts, values[flat], 0).reshape(seen.shape)
        if bool(values[~is_taken].count_nonzero()):
            raise UnknownSeedsError("a gradient reaches what the graph gives past its results")


def _slots(structure: OutputTree) -> list[int]:
    """Return which tensors a structure holds, each once, in the order in which a walk finds them."""
    found: dict[int, None] = {}
    pending: list[Tree] = [structure.tree]
    while pending:
        tree = pending.pop()
        if isinstance(tree, Slot):
            found.setdefault(tree.index)
        elif isinstance(tree, Container):
            pending.extend(reversed(tree.children))
    return list(found)
