# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which way the branches of a module's calls went in PyTorch, and for which calls that is of use."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Hashable, Iterator, Sequence

from ortrain.capture.branches import Branch, asks_for_values, branches_recorded
from ortrain.capture.errors import EverNewCallError, FirstCallError
from ortrain.capture.signature import FlatCall
from ortrain.entry import Entry
from ortrain.fallback import is_switched_on
from ortrain.piece_costs import Choice

# Kinds of calls that are remembered.
_MOST_KINDS = 64
# Looks at how branches go, after which each counts as a capture that was of no use.
_FEW_LOOKS = 16
# Runs of a graph that count for nothing, and which part of all of its runs they are, after which there is none.
_MOST_LOST, _PART_LOST = 2, 8


class KnownBranches:
    """Remembers how branches on values went, by kind of call."""

    def __init__(self) -> None:
        # None for kinds of calls of which no graph follows the branches.
        self._known: collections.OrderedDict[Hashable, tuple[Branch, ...] | None] = (
            collections.OrderedDict()
        )
        self._looks = 0
        self._forgotten: collections.OrderedDict[Hashable, None] = collections.OrderedDict()

    def of(self, kind: Hashable) -> Sequence[Branch]:
        """Return how the branches of a kind of call went, as far as that is known and of use."""
        return self._known.get(kind) or ()

    def may_help(self, kind: Hashable, call: FlatCall, error: BaseException) -> bool:
        """Take note of a capture that has failed; tell whether it is worth to see how branches go."""
        known = self._known.get(kind, ())
        if isinstance(error, (FirstCallError, EverNewCallError)):
            return False
        if known:
            self._remember(kind, None)
        # What a device finds in values on the way that PyTorch does not go comes late.
        on_cpu = all(tensor.device.type == "cpu" for tensor in call.tensors)
        # So does a NaN there, for which the user wants an error.
        is_left = Choice.current() is Choice.ALL or is_switched_on("ORTRAIN_CHECK_NAN")
        helps = known == () and on_cpu and asks_for_values(error) and not is_left
        self._looks += helps
        return helps

    @property
    def looks_are_few(self) -> bool:
        """Whether captures that ended to see how branches go need not count against the module."""
        return self._looks <= _FEW_LOOKS

    def forget(self, kind: Hashable) -> None:
        """Look again how branches go, for the first calls may initialize something; the second time, give up."""
        if kind in self._forgotten:
            self._remember(kind, None)
            return
        self._known.pop(kind, None)
        self._forgotten[kind] = None
        if len(self._forgotten) > _MOST_KINDS:
            self._forgotten.popitem(last=False)

    @contextlib.contextmanager
    def recorded(self, kind: Hashable) -> Iterator[None]:
        """Remember how branches go in PyTorch's run of a call."""
        with branches_recorded() as branches:
            yield
        self._remember(kind, tuple(branches) or None)

    def are_worth_it(self, entry: Entry) -> bool:
        """Take note of a run of a graph that counts for nothing; tell whether the graph is worth to be kept."""
        entry.lost_runs += 1
        return entry.lost_runs <= max(_MOST_LOST, entry.runs // _PART_LOST)

    def _remember(self, kind: Hashable, branches: tuple[Branch, ...] | None) -> None:
        self._known[kind] = branches
        self._known.move_to_end(kind)
        if len(self._known) > _MOST_KINDS:
            self._known.popitem(last=False)
