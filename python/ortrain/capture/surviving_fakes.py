# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Tensors without contents that somebody keeps after the trace in which a forward has made them.

`ReachableState` sets back what the module and its arguments lead to. Tables of a library, or of `functools.lru_cache`,
are found here, by what is still alive.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

_LruCache = type(functools.lru_cache(lambda: None))


class FakesMade:
    """Knows the tensors without contents that are made while `recording`."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[FakeTensor]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this thread makes."""
        original, thread = FakeTensor.__new__, threading.get_ident()

        def make(cls: type, *args: Any, **kwargs: Any) -> FakeTensor:
            tensor = original(cls, *args, **kwargs)
            if threading.get_ident() == thread:
                self._made.append(weakref.ref(tensor))
            return tensor

        FakeTensor.__new__ = staticmethod(make)
        try:
            yield
        finally:
            FakeTensor.__new__ = staticmethod(original)

    @contextlib.contextmanager
    def taken_back(self, found: list[str]) -> Iterator[None]:
        """Afterwards take them out of the tables that were there before, and add to ``found`` what these are."""
        collects = gc.isenabled()
        gc.disable()  # a trace makes much and lets go of little
        try:
            before = gc.get_objects()  # kept, so that no address is used again
            try:
                yield
            finally:
                gc.collect(0)  # all that has been made since
                found += self._take_back(before)
                del before
        finally:
            if collects:
                gc.enable()

    def _take_back(self, before: list[Any]) -> list[str]:
        alive = {id(t): t for t in (made() for made in self._made) if t is not None}
        for value in gc.get_objects() if alive else ():
            if type(value) is fx.Node:
                for held in (value.meta.get(key) for key in ("val", "example_value")):
                    for tensor in held if isinstance(held, (list, tuple)) else [held]:
                        alive.pop(id(tensor), None)
        if not alive:
            return []
        old = set(map(id, before))
        return _taken_out(list(alive.values()), old, {id(alive), id(before)})


def _taken_out(values: list[Any], old: set[int], ours: set[int]) -> list[str]:
    """Take values out of the tables that hold them and are held by what is older; return what these are.

    Args:
      values: Objects.
      old: Addresses of what was there before.
      ours: Addresses of what counts for nothing.
    """
    found = []
    ours |= {id(values)}
    holders = gc.get_referrers(*values)
    ours |= {id(holders)}
    for holder in holders:
        if id(holder) in ours:
            continue
        if isinstance(holder, tuple):
            found += _taken_out([holder], old, ours)
        elif id(holder) in old or any(id(h) in old - ours for h in gc.get_referrers(holder)):
            found += [name for name in [_take_out(values, holder)] if name]
    return found


def _take_out(values: list[Any], holder: Any) -> str:
    """Take values out of a container; return what it is, "" for one that they may stay in."""
    taken = set(map(id, values))
    if isinstance(holder, _LruCache):
        holder.cache_clear()
        return f"the cache of {holder.__qualname__}()"
    if isinstance(holder, dict):
        for key in [k for k, value in list(holder.items()) if id(value) in taken]:
            del holder[key]
        return "a dictionary"
    if isinstance(holder, list):
        holder[:] = [value for value in holder if id(value) not in taken]
        return "a list"
    return ""
