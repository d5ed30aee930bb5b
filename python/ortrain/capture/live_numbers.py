# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers among the arguments that change from call to call, as inputs of one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ortrain.capture.guards import Guards, sizes_of
from ortrain.capture.signature import FlatCall, may_be_live

# Kinds of calls whose numbers are remembered.
_MOST_KINDS = 64


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


class LiveAttributes:
    """Which numbers among the attributes of layers are inputs of graphs: those seen to change."""

    def __init__(self) -> None:
        self._live: dict[str, tuple[nn.Module, str, int | float]] = {}  # with the first value seen
        self._constant: set[str] = set()
        self._seen: dict[str, tuple[nn.Module, str, int | float]] | None = None

    @property
    def are_any(self) -> bool:
        """Whether there is a live one."""
        return bool(self._live)

    def present(self) -> list[tuple[str, nn.Module, str]]:
        """Return path, layer and name of each live one."""
        return [(path, layer, name) for path, (layer, name, _) in self._live.items()]

    def changed_in(self, module: nn.Module, names: frozenset[str] | None) -> bool:
        """Look at the attributes of a module for which there is no graph.

        Args:
          module: The module.
          names: Those that its forward has read; None for all.

        Returns:
          Whether there are more live attributes now.
        """
        now = {
            f"{path}.{name}" if path else f".{name}": (layer, name, value)
            for path, layer in module.named_modules()
            for name, value in layer.__dict__.items()
            if type(value) in (int, float) and (names is None or name in names)
        }
        before, self._seen = self._seen, now
        count = len(self._live)
        for path, (layer, name, value) in (before or {}).items():
            here = now.get(path)
            if path in self._live or path in self._constant or here is None:
                continue
            if here[0] is layer and repr(here[2]) != repr(value):
                self._live[path] = layer, name, value
        return len(self._live) > count

    def give_up(self, paths: Collection[str]) -> None:
        """Hold attributes fixed from now on."""
        self._constant.update(paths)
        for path in paths:
            self._live.pop(path, None)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let live attributes have the first value seen, for who compares them."""
        now = []
        for layer, name, first in self._live.values():
            # Only numbers that a graph takes as an input may hide their value.
            if may_be_live(layer.__dict__.get(name)):
                now.append((layer.__dict__, name, layer.__dict__[name]))
                layer.__dict__[name] = first
        try:
            yield
        finally:
            for attributes, name, value in now:
                attributes[name] = value


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
