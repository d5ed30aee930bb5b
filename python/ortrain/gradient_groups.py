# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which inputs of a graph get a gradient from which of its results.

PyTorch runs the nodes of all inputs that lie behind a node, hooks among them, whether a gradient comes or not. Inputs that
other results reach than others lie behind nodes of their own, so that a backward comes to those alone that it comes to
in PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

# Of backwards of one forward that wanted some gradients only; what is left of older ones is let go.
_MOST_UNFINISHED = 4

Gradients = Sequence[torch.Tensor | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """Inputs by the results that reach them, and results by the inputs that they reach.

    Attributes:
      inputs: Positions of inputs, those together that the same results reach.
      results: Results that reach the same inputs: their numbers, and the numbers of their groups of inputs.
    """

    inputs: list[list[int]]
    results: list[tuple[list[int], list[int]]]


def groups_of(graph: Any, differentiable: Sequence[bool]) -> Groups | None:
    """Return the groups; None where all results that want a gradient reach the same inputs.

    Args:
      graph: Before autodiff.
      differentiable: Whether each result of the user wants a gradient.
    """
    if sum(differentiable) < 2:
        return None
    position = {described["name"]: i for i, described in enumerate(graph.inputs)}
    reached = {
        i: frozenset(position[name] for name in names)
        for i, names in enumerate(graph.gradient_paths())
        if differentiable[i]
    }
    if len(set(reached.values())) == 1:
        return None
    by_results: dict[tuple[int, ...], list[int]] = {}
    for p in sorted(frozenset().union(*reached.values())):
        by_results.setdefault(tuple(i for i, all_of in reached.items() if p in all_of), []).append(
            p
        )
    keys = list(by_results)
    results: dict[tuple[int, ...], list[int]] = {}
    for i in reached:
        groups = tuple(number for number, key in enumerate(keys) if i in key)
        results.setdefault(groups, []).append(i)
    return Groups(list(by_results.values()), [(own, list(g)) for g, own in results.items()])


class Collected:
    """Gradients of results, until the first input wants its own, and what has been made of them since.

    Args:
      count: How many results there are.
      run: Runs the backward from gradients of the results; returns those of all inputs.
    """

    def __init__(self, count: int, run: Callable[[Gradients], Gradients]) -> None:
        self._count, self._run = count, run
        self._arrived: dict[int, dict[int, torch.Tensor]] = {}  # by backward
        self._made: dict[int, dict[int, torch.Tensor]] = {}

    def add(self, task: int, results: Sequence[int], gradients: Gradients) -> bool:
        """Take the gradients of some results; tell whether there are any."""
        given = {i: g for i, g in zip(results, gradients, strict=True) if g is not None}
        if given:
            for held in (self._arrived, self._made):
                for old in [t for t in held if t != task][: max(0, len(held) - _MOST_UNFINISHED)]:
                    del held[old]
            self._arrived.setdefault(task, {}).update(given)
        return bool(given)

    def take(self, task: int, positions: Iterable[int]) -> list[torch.Tensor | None]:
        """Return the gradients of inputs, which are used up by that.

        All that has come in goes into one backward. What comes later, from another device say, goes into another one,
        for the inputs that have not had theirs: none of the others is reached by it.
        """
        arrived = self._arrived.pop(task, None)
        if arrived:
            made = self._made.setdefault(task, {})
            for p, g in enumerate(self._run([arrived.get(i) for i in range(self._count)])):
                if g is not None:
                    made[p] = made[p] + g if p in made else g
        made = self._made.get(task, {})
        taken = [made.pop(p, None) for p in positions]
        if not made:
            self._made.pop(task, None)
        return taken
