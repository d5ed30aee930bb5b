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
import inspect
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

_MAY_BE_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_LruCache = type(functools.lru_cache(lambda: None))


class FakesMade:
    """Knows the tensors without contents that are made while `recording`."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[FakeTensor]] = []

    @contextlib.contextmanager
    def recording(self, action: Callable[[], None] | None = None) -> Iterator[None]:
        """Record what this thread makes, and call ``action`` before each of them is made."""
        original, thread = FakeTensor.__new__, threading.get_ident()

        def make(cls: type, *args: Any, **kwargs: Any) -> FakeTensor:
            is_ours = threading.get_ident() == thread
            if is_ours and action is not None:
                action()
            tensor = original(cls, *args, **kwargs)
            if is_ours:
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
        _collections.catch_up()
        with without_collections():  # a trace makes much and lets go of little
            ages = _Ages()
            try:
                yield
            except BaseException as error:
                _let_go_of_frames(error, ages.young())
                raise
            finally:
                ages.end()
                found += self._take_back(ages)

    def _take_back(self, ages: _Ages) -> list[str]:
        alive = {id(t): t for t in (made() for made in self._made) if t is not None}
        for value in ages.made if alive else ():
            if type(value) is fx.Node:
                for held in (value.meta.get(key) for key in ("val", "example_value")):
                    for tensor in held if isinstance(held, (list, tuple)) else [held]:
                        alive.pop(id(tensor), None)
        if not alive:
            return []
        return _taken_out(list(alive.values()), ages, {id(alive), id(ages.made)})


def _let_go_of_frames(error: BaseException, young: set[int]) -> None:
    """Clear the variables of functions that an error has ended, which hold most of what a trace has made.

    Args:
      error: What ended the trace; it may lead to errors of somebody's that are older, and to generators that go on.
      young: Addresses of what the trace has made.
    """
    seen = set()
    errors: list[BaseException | None] = [error]
    while errors:
        ended = errors.pop()
        if ended is None or id(ended) in seen:
            continue
        seen.add(id(ended))
        errors += [ended.__cause__, ended.__context__]
        for frame, _ in traceback.walk_tb(ended.__traceback__):
            is_suspended = frame.f_code.co_flags & _MAY_BE_SUSPENDED
            if id(frame) in young and not is_suspended:
                with contextlib.suppress(RuntimeError):  # it is running
                    frame.clear()


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Let no garbage be collected by itself: finalizers run where they happen to, in anybody's code."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def without_collection_callbacks() -> Iterator[None]:
    """Keep those who watch collections from running: Dynamo collects garbage in the middle of a trace."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        yield
    finally:
        gc.callbacks[:0] = callbacks


class _Collections:
    """Counts what traces leave behind, since freezing starts Python's own counts again.

    By these a collection of everything comes when a quarter as much is new as was there, so that what waits is bounded.
    """

    def __init__(self) -> None:
        self._new = self._older = 0
        self._done = -1

    def add(self, count: int, older: int) -> None:
        """Take note of objects that a trace has made, beside so many older ones."""
        done = gc.get_stats()[-1]["collections"]
        self._new = count + (self._new if done == self._done else 0)
        self._done, self._older = done, older

    def catch_up(self) -> None:
        """Collect if it is time to, and wanted."""
        if gc.isenabled() and self._new > max(self._older // 4, _LEAST_NEW):
            self._new = 0
            gc.collect()


# As many as a trace of a few layers makes: a collection takes a twentieth of its time.
_LEAST_NEW = 10_000
_collections = _Collections()


class _Ages:
    """Tells what garbage collection knew at one moment from what it knows at a later one.

    Freezing sets apart what is there, of which there may be millions, without looking at it.

    Attributes:
      made: What is new, once it has ended.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self._freezes = gc.get_freeze_count() == 0  # somebody else's frozen objects stay frozen
        # Kept, so that no address is used again.
        self._before = [] if self._freezes else gc.get_objects()
        if self._freezes:
            gc.freeze()

    def young(self) -> set[int]:
        """Return the addresses of what is new already."""
        return set(map(id, gc.get_objects())).difference(map(id, self._before))

    def end(self) -> None:
        """Be at the later moment."""
        gc.collect(0)  # all that has been made since
        self.made = gc.get_objects()
        if self._freezes:
            _collections.add(len(self.made), gc.get_freeze_count())
            gc.unfreeze()
        else:
            known = set(map(id, self._before))
            self.made = [value for value in self.made if id(value) not in known]

    def old_among(self, values: list[Any]) -> set[int]:
        """Return the addresses of those that were there at first, of objects that are tracked."""
        young = {*map(id, self.made), *map(id, gc.get_objects(0))}  # the latter made since the end
        return {id(value) for value in values} - young


def _taken_out(values: list[Any], ages: _Ages, ours: set[int]) -> list[str]:
    """Take values out of the tables that hold them and are held by what is older; return what these are.

    Args:
      values: Objects.
      ages: Tells what is older.
      ours: Addresses of what counts for nothing.
    """
    holders = gc.get_referrers(*values)
    ours = {*ours, id(values), id(holders)}
    holders = [h for h in holders if id(h) not in ours]
    old = ages.old_among(holders)
    tuples = [h for h in holders if isinstance(h, tuple)]
    tables = [h for h in holders if id(h) in old and not isinstance(h, tuple)]
    ours |= {id(holders), id(tuples), id(tables)}
    # A table is tracked once it holds what is tracked, however old it is.
    rest = {id(h): h for h in holders if isinstance(h, (dict, list)) and id(h) not in old}
    owners = gc.get_referrers(*rest.values()) if rest else []
    old_owners = ages.old_among(owners)
    for owner in owners:
        if id(owner) in old_owners:
            held = [part for part in gc.get_referents(owner) if id(part) in rest]
            tables += [rest.pop(id(part)) for part in held if id(part) in rest]
    found = [name for name in [_take_out(values, table) for table in tables] if name]
    return found + (_taken_out(tuples, ages, {*ours, id(rest), id(owners)}) if tuples else [])


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
