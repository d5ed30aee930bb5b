# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which way the branches of a module's calls went in PyTorch, and for which calls that is of use."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Hashable, Iterator, Sequence

from ortrain.capture.branches import Branch, asks_for_values, branches_recorded
from ortrain.capture.signature import FlatCall
from ortrain.entry import Entry
from ortrain.piece_costs import Choice

# Kinds of calls that are remembered.
_MOST_KINDS = 64
# Runs of a graph that count for nothing, and which part of all of its runs they are, after which there is none.
_MOST_LOST, _PART_LOST = 2, 8


class KnownBranches:
    """Remembers how branches on values went, by kind of call."""

    def __init__(self) -> None:
        # None for kinds of calls of which no graph follows the branches.
        self._known: collections.OrderedDict[Hashable, tuple[Branch, ...] | None] = (
            collections.OrderedDict()
        )

    def of(self, call: FlatCall) -> Sequence[Branch]:
        """Return how the branches of calls like this one went, as far as that is known and of use."""
        return self._known.get(call.key) or ()

    def may_help(self, call: FlatCall, error: BaseException) -> bool:
        """Take note of a capture that has failed; tell whether it is worth to see how branches go."""
        known = self._known.get(call.key, ())
        if known:
            self.give_up(call)
        # What a device finds in values on the way that PyTorch does not go comes late.
        on_cpu = all(tensor.device.type == "cpu" for tensor in call.tensors)
        return (
            known == () and on_cpu and asks_for_values(error) and Choice.current() is not Choice.ALL
        )

    def give_up(self, call: FlatCall) -> None:
        """Let calls like this one have no such graph."""
        self._remember(call, None)

    @contextlib.contextmanager
    def recorded(self, call: FlatCall) -> Iterator[None]:
        """Remember how branches go in PyTorch's run of a call."""
        with branches_recorded() as branches:
            yield
        self._remember(call, tuple(branches) or None)

    def are_worth_it(self, entry: Entry) -> bool:
        """Take note of a run of a graph that counts for nothing; tell whether the graph is worth to be kept."""
        entry.lost_runs += 1
        return entry.lost_runs <= max(_MOST_LOST, entry.runs // _PART_LOST)

    def _remember(self, call: FlatCall, branches: tuple[Branch, ...] | None) -> None:
        self._known[call.key] = branches
        self._known.move_to_end(call.key)
        if len(self._known) > _MOST_KINDS:
            self._known.popitem(last=False)
