# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What graphs a call ran, told to whoever watches this thread."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from ortrain.entry import Entry

_thread = threading.local()


class GradientWitness(Protocol):
    """Sees the gradients of one run of a graph as they are made."""

    def begin(self, incoming: Sequence[torch.Tensor | None], made: Sequence[int]) -> None:
        """Take the gradients of the graph's outputs, and the inputs that will get one."""

    def compare(self, positions: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """Look at gradients of inputs of the graph, by position, before they are handed on."""


@dataclasses.dataclass(slots=True)
class GraphRun:
    """One run of a captured graph.

    Attributes:
      entry: The graph.
      inputs: Its inputs, and behind them those derived for packed rows.
      form: Which rows it computed.
      step: What its backward belongs to; None where it has none.
    """

    entry: Entry
    inputs: Sequence[torch.Tensor]
    form: bool | None
    step: Any


@contextlib.contextmanager
def watched() -> Iterator[list[GraphRun]]:
    """Collect the runs of graphs in this thread; the innermost one that watches is told."""
    outer = getattr(_thread, "runs", None)
    runs: list[GraphRun] = []
    _thread.runs = runs
    try:
        yield runs
    finally:
        _thread.runs = outer


def tell(
    entry: Entry,
    inputs: Sequence[torch.Tensor],
    form: bool | None,
    step: Any = None,
) -> None:
    """Tell of a run that is over, where somebody watches."""
    runs = getattr(_thread, "runs", None)
    if runs is not None:
        runs.append(GraphRun(entry, inputs, form, step))
