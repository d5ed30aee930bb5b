# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What installed packages keep in their modules and change at each call: counts, averages, histories, generators."""

from __future__ import annotations

import collections
import copy
import itertools
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch

from ortrain.capture.library_reads import attributes_of, is_of_library
from ortrain.capture.shallow_copies import is_equal

_MOST_ITEMS = 1024
_MOST_OBJECTS = 3  # within each other
# Of the globals of modules, most; the numbers among them are told by the code that sets them.
_NO_STATE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(type, str, bytes, int, float, complex, bool, tuple, frozenset, type(None)),
)

# How to see that an object has changed, and how to set it back.
_Watched = tuple[Callable[[], bool], Callable[[], None]]


class _State(NamedTuple):
    """What a package keeps at one place.

    Attributes:
      names: The global of its module, and attributes that lead from there; others that lead to the same object.
      module: The first of these modules.
      has_changed: Whether it is another one than before, by what counts a call.
      set_back: Makes it what it was.
    """

    names: list[tuple[str, ...]]
    module: str
    has_changed: Callable[[], bool]
    set_back: Callable[[], None]


class LibraryState:
    """The state of packages at the moment at which this is made.

    Args:
      modules: Of the packages.
    """

    def __init__(self, modules: Iterable[types.ModuleType]) -> None:
        self._kinds: dict[type, _Kind | None] = dict.fromkeys(_NO_STATE)
        self._known: dict[int, list[_State]] = {}  # by the object
        for module in modules:
            table = vars(module)
            for name, value in list(table.items()):
                self._take(table, (name,), value, module.__name__)

    def take_back(self, names: Collection[str]) -> str:
        """Set back what has changed since, as far as code led there by names; return which that was, "" for none."""
        found = ""
        for state in itertools.chain.from_iterable(self._known.values()):
            is_named = any(all(name in names for name in way) for way in state.names)
            if is_named and state.has_changed():
                state.set_back()
                found = f"'{'.'.join(state.names[0])}' of {state.module}"
        return found

    def _take(
        self, holder: dict[str, Any], names: tuple[str, ...], value: Any, module: str
    ) -> None:
        cls = type(value)
        try:
            kind = self._kinds[cls]
        except KeyError:
            kind = self._kinds[cls] = _kind_of(cls)
        if kind is None:
            return
        if id(value) in self._known:
            for state in self._known[id(value)]:
                state.names.append((*names, *state.names[0][len(names) :]))
            return
        states = self._known[id(value)] = []
        if kind is not _watched_object:
            if (watched := kind(holder, names[-1], value)) is not None:
                states.append(_State([names], module, *watched))
            return
        attributes = attributes_of(value)
        if attributes is None or len(names) > _MOST_OBJECTS:
            return
        for name, held in list(attributes.items()):
            if is_counted(type(held)):
                states.append(_State([(*names, name)], module, *_watched_item(attributes, name)))
            else:
                self._take(attributes, (*names, name), held, module)


def is_counted(cls: type) -> bool:
    """Tell whether values of a class may be counts or averages, and not flags that something was done."""
    return issubclass(cls, (int, float, complex, torch.Tensor)) and cls is not bool


def is_another_count(before: Any, now: Any) -> bool:
    """Tell whether a number or a tensor has taken the place of another one."""
    if now is before or not (is_counted(type(before)) and is_counted(type(now))):
        return False
    if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor):
        return True
    return bool((type(now), now) != (type(before), before))


# Of what holds an object, the name under which it does so, and the object; None where nothing of it counts.
_Kind = Callable[[dict[str, Any], str, Any], "_Watched | None"]


def _kind_of(cls: type) -> _Kind | None:
    """Return what counts of objects of a class; None for nothing."""
    if issubclass(cls, random.Random):
        return None if issubclass(cls, random.SystemRandom) else _watched_random
    numpy = sys.modules.get("numpy")
    if numpy and issubclass(cls, (numpy.random.Generator, numpy.random.RandomState)):
        return _watched_bits
    if cls is itertools.count:
        return _watched_iterator
    if issubclass(cls, dict):
        return _watched_table
    if issubclass(cls, (list, collections.deque)):
        return _watched_list
    return _watched_object if is_of_library(cls) else None


def _watched_object(_: Any, __: str, ___: Any) -> None:
    """Stand for objects of packages: their attributes count one by one."""


def _watched_item(attributes: dict[str, Any], name: str) -> _Watched:
    before = attributes[name]
    return (
        lambda: is_another_count(before, attributes.get(name)),
        lambda: attributes.update({name: before}),
    )


def _watched_random(_: Any, __: str, generator: random.Random) -> _Watched:
    before = generator.getstate()
    return lambda: generator.getstate() != before, lambda: generator.setstate(before)


def _watched_bits(_: Any, __: str, generator: Any) -> _Watched:
    """Watch a generator of NumPy; one of the earlier kind has one of the later kind's within."""
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    before = copy.deepcopy(bits.state)
    return lambda: not is_equal(bits.state, before), lambda: setattr(bits, "state", before)


def _watched_iterator(holder: dict[str, Any], name: str, count: Any) -> _Watched:
    """Watch a count; nobody can set one back, so that another one takes its place."""
    before = copy.copy(count)
    return lambda: repr(count) != repr(before), lambda: holder.update({name: before})


def _watched_table(_: Any, __: str, table: dict[Any, Any]) -> _Watched | None:
    """Watch the numbers of a table; more items may come."""
    if dict.__len__(table) > _MOST_ITEMS:
        return None
    counts = {key: value for key, value in dict.items(table) if is_counted(type(value))}
    if not counts:
        return None

    def has_changed() -> bool:
        return any(is_another_count(count, dict.get(table, key)) for key, count in counts.items())

    return has_changed, lambda: dict.update(table, counts)


def _watched_list(_: Any, __: str, items: Any) -> _Watched | None:
    """Watch a list or a queue of numbers, and those that come."""
    kind: Any = list if isinstance(items, list) else collections.deque
    before = list(kind.__iter__(items)) if kind.__len__(items) <= _MOST_ITEMS else [None]
    if not all(is_counted(type(item)) for item in before):
        return None

    def has_changed() -> bool:
        now = list(kind.__iter__(items))
        if len(now) == len(before):
            return any(map(is_another_count, before, now))
        return all(is_counted(type(item)) for item in now)

    def set_back() -> None:
        kind.clear(items)
        kind.extend(items, before)

    return has_changed, set_back
