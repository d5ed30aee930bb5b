# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers among the arguments that change from call to call, as inputs of one graph."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from ortrain.capture.guards import Guards, sizes_of
from ortrain.capture.signature import FlatCall

# Kinds of calls whose numbers are remembered.
_MOST_KINDS = 64
# These ask for the numbers of a trace by their own names.
_KNOW_TRACES = ("torch", "sympy", "ortrain", "mpmath")


class EveryPath(Collection[str]):
    """Contains all paths: each number of a call is live."""

    def __contains__(self, path: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 1


class LiveNumbers:
    """Which numbers of one module's calls are inputs of its graphs: those seen to change.

    Attributes:
      paths: Theirs.
    """

    def __init__(self) -> None:
        self.paths: frozenset[str] = frozenset()
        self._constant: set[str] = set()  # for which no graph holds with more than one value
        self._seen: dict[Hashable, Mapping[str, int | float]] = {}

    def changed_by(self, call: FlatCall) -> bool:
        """Take note of a call for which there is no graph; tell whether there are more live numbers now.

        Args:
          call: With all its numbers live.
        """
        known = self._seen.setdefault(call.key, call.numbers)
        if len(self._seen) > _MOST_KINDS:
            del self._seen[next(iter(self._seen))]
        other = {p for p, v in call.numbers.items() if repr(v) != repr(known[p])}
        other -= self._constant
        before = self.paths
        self.paths |= other
        return self.paths != before

    def give_up(self, paths: Collection[str]) -> None:
        """Hold numbers fixed from now on, each value in a graph of its own."""
        self._constant.update(paths)
        self.paths -= self._constant


def fixed_numbers(guards: Guards, call: FlatCall) -> list[str]:
    """Return the paths of live ints of which a graph holds for the call's own values only."""
    count = len(call.tensors)
    found = []
    for place, (path, value) in enumerate(call.numbers.items()):
        if type(value) is not int:
            continue
        others = (value + 1, value + 2, value + 3, 2 * value, max(2, value // 2))
        sizes: list[Any] = list(sizes_of(call.tensors))
        for other in others:
            if other == value:
                continue
            sizes[count - 1 - place] = torch.Size((other, 0))
            if guards.holds(sizes):
                break
        else:
            found.append(path)
    return found


@contextlib.contextmanager
def classes_of_numbers() -> Iterator[None]:
    """Let ``isinstance`` tell code that is being traced that live numbers are what they stand for."""
    original = builtins.isinstance

    def isinstance_of_value(value: Any, kinds: Any) -> bool:
        if original(value, kinds):
            return True
        kind = type(value)
        if kind is not torch.SymInt and kind is not torch.SymFloat:
            return False
        caller = sys._getframe(1).f_globals.get("__name__") or ""
        if caller.partition(".")[0] in _KNOW_TRACES:
            return False
        return original(0 if kind is torch.SymInt else 0.0, kinds)

    with mock.patch.object(builtins, "isinstance", isinstance_of_value):
        yield
