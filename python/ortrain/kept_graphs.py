# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The graphs that an engine keeps, and what it has found to have none, by kind of call."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator, Sequence

from ortrain.capture.errors import FailedRunError
from ortrain.capture.guards import sizes_of
from ortrain.capture.signature import FlatCall
from ortrain.entry import Entry
from ortrain.fallback import Refused, Sizes
from ortrain.module_states import ModuleStates

# Graphs for the sizes of one call each, beside one that holds for more and does not run them.
_MOST_FIXED = 4
# Sizes that a graph has failed to run, or that have none.
_MOST_SIZES = 256
# Kind of the call, number of the module's state, modes of PyTorch.
Key = tuple[Hashable, int, Hashable]


class KeptGraphs:
    """Keeps a bounded number of graphs and refusals; of all kinds of calls the least recently used goes first.

    Args:
      name: The module's class, for errors.
      most: How many.
      states: Of the module; those that nothing kept is for are forgotten.
    """

    def __init__(self, name: str, most: int, states: ModuleStates) -> None:
        self._name, self._most, self._states = name, most, states
        self._entries: collections.OrderedDict[Key, list[Entry | Refused]] = (
            collections.OrderedDict()
        )

    def find(self, key: Key, call: FlatCall) -> Entry | Refused | None:
        """Return what holds for a call; None where there is nothing yet."""
        entries = self._entries.get(key)
        if entries is None:
            return None
        self._entries.move_to_end(key)
        return next((entry for entry in entries if entry.fits(call)), None)

    def of(self, key: Key) -> Sequence[Entry | Refused]:
        """Return all that there is for a kind of call."""
        return self._entries.get(key, ())

    def __iter__(self) -> Iterator[Entry]:
        for entries in self._entries.values():
            yield from (entry for entry in entries if isinstance(entry, Entry))

    def keep(self, key: Key, entry: Entry | Refused) -> bool:
        """Add one; return whether a graph had to go for it."""
        self._entries.setdefault(key, []).append(entry)
        has_dropped = False
        while sum(map(len, self._entries.values())) > self._most:
            oldest = next(iter(self._entries))
            has_dropped |= isinstance(self._entries[oldest].pop(0), Entry)
            if not self._entries[oldest]:
                del self._entries[oldest]
        self.forget_states()
        return has_dropped

    def drop(self, entry: Entry) -> None:
        """Keep a graph no longer."""
        for key, held in list(self._entries.items()):
            held[:] = [each for each in held if each is not entry]
            if not held:
                del self._entries[key]

    def forget_states(self) -> None:
        """Forget the states of the module that nothing is kept for."""
        self._states.keep(state for _, state, _ in self._entries)

    def renumber(self, before: int, now: int) -> None:
        """Let what was kept for one state stand for another."""
        kept = ((k if k[1] != before else (k[0], now, k[2]), v) for k, v in self._entries.items())
        self._entries = collections.OrderedDict(kept)

    def leave_sizes(self, entry: Entry, call: FlatCall, error: Exception) -> None:
        """Keep calls of these sizes away from a graph, and from another capture if it is of no use."""
        sizes = tuple(sizes_of(call.tensors))
        if len(entry.failed) >= _MOST_SIZES:
            entry.failed.clear()
        entry.failed.add(sizes)
        key = next((k for k, held in self._entries.items() if any(entry is e for e in held)), None)
        if key is not None and (entry.fixed or self.has_enough_fixed(key)):
            self.refuse_sizes(key, sizes, error)

    def has_enough_fixed(self, key: Key) -> bool:
        """Tell whether no further call of a kind gets a graph for its sizes alone."""
        return sum(isinstance(e, Entry) and e.fixed for e in self.of(key)) >= _MOST_FIXED

    def refuse_sizes(self, key: Key, sizes: Sizes, error: Exception) -> Refused:
        """Leave calls of these sizes to PyTorch."""
        entries = self._entries.setdefault(key, [])
        refused = next((e for e in entries if isinstance(e, Refused) and e.sizes is not None), None)
        if refused is None:
            failed = FailedRunError(str(error), module=self._name)
            refused = Refused(failed, "", shown=True, sizes=set())
            entries.append(refused)
        assert refused.sizes is not None
        refused.sizes.add(sizes)
        if len(refused.sizes) > _MOST_SIZES:
            refused.sizes.pop()
        return refused
