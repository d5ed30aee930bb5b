# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions under ``functools.lru_cache`` that a forward can reach, and whether it gets tensors from them.

Such a cache may be emptied, and its tensors written to, where no guard looks; Dynamo calls the function behind it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch

LruCache: type = type(functools.lru_cache(lambda: None))
_DEPTH = 6  # of containers within each other


class CachedFunctions:
    """Those that were found, and how often each had been called by then."""

    def __init__(self) -> None:
        self._found: list[tuple[Any, Any]] = []

    def add(self, function: Any) -> None:
        """Take note of one."""
        self._found.append((function, function.cache_info()))

    def names(self) -> list[str]:
        """Return what all of them are called."""
        return [_name(function) for function, _ in self._found]

    def with_tensors(self) -> list[str]:
        """Return the names of those that keep tensors."""
        return [_name(function) for function, _ in self._found if _keeps_tensors(function)]

    def emptied(self) -> list[str]:
        """Empty those that have come to keep tensors, which are a trace's; return their names."""
        found = []
        for function, before in self._found:
            if function.cache_info()[:2] != before[:2] and _keeps_tensors(function):
                function.cache_clear()
                found.append(_name(function))
        return found


def _keeps_tensors(function: Any) -> bool:
    return _holds_tensor(gc.get_referents(function), _DEPTH)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _holds_tensor(values: Iterable[Any], depth: int) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            return True
        if depth == 0 or value is None or isinstance(value, (str, bytes, type)):
            continue
        if isinstance(value, Mapping):
            inside: Iterable[Any] = [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            inside = list(value)
        else:
            inside = getattr(value, "__dict__", {}).values()
        if _holds_tensor(inside, depth - 1):
            return True
    return False
