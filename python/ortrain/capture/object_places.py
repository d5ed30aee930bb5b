# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which of the places that a forward can reach hold the same object, and what is not there.

Dynamo compares objects by what it has read of them: code that was made while two names stood for two objects runs on when
both stand for one, and when a class or a module gets what it did not have.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ortrain import _core
from ortrain.capture.absent_names import names_of_classes
from ortrain.capture.reachable_state import ReachableState, is_looked_into

# The attributes that each layer has: they lead to parameters, buffers, layers and hooks.
OF_LAYERS = frozenset(nn.Module().__dict__)


class ObjectPlaces:
    """The places in which a module and what it leads to hold objects, or nothing, when this is made.

    Args:
      module: The module.
      arguments: What it is called with, whose own places count for nothing.
    """

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        reached = ReachableState(module, arguments, keeps_contents=False, tensors=False)
        self._places = [
            (holder, key)
            for holder, key, value in reached.places()
            if key not in OF_LAYERS and (value is None or is_looked_into(value))
        ]
        self._guard = _core.ModuleGuard([], reached.names, list(reached.unfollowed()))
        # Of no name but those that Python itself asks for.
        classes = list(names_of_classes(reached.classes))
        self._special_methods = _core.ModuleGuard([], frozenset(), classes)
        self._seen: tuple[int, ...] = ()
        self._pattern: tuple[int, ...] = ()

    def are_followed(self) -> bool:
        """Tell whether no class has got, or lost, a special method, of which Dynamo remembers what it found at first."""
        return bool(self._special_methods.holds())

    def are_current(self) -> bool:
        """Tell whether nothing is there that was not, of what functions may ask for."""
        return bool(self._guard.holds())

    def pattern(self) -> tuple[int, ...]:
        """Return for each place the first one that holds the same object now."""
        seen = tuple(id(_held(holder, key)) for holder, key in self._places)
        if seen != self._seen:
            first: dict[int, int] = {}
            self._pattern = tuple(first.setdefault(at, i) for i, at in enumerate(seen))
            self._seen = seen
        return self._pattern


def _held(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):  # without what some make of a key that is missing
        return dict.get(holder, key)
    try:
        return holder[key]
    except (KeyError, IndexError):
        return None
