# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What installed packages keep in their modules and change at each call: counts, averages, histories, generators."""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import functools
import itertools
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ortrain.capture.library_reads import attributes_of, is_of_library, slot_of, slots_of
from ortrain.capture.shallow_copies import is_equal
from ortrain.capture.torch_internals import outside_of_modes

_MOST_ITEMS = 1024
_MOST_BYTES = 1 << 16  # of a tensor
_MOST_HOLDERS = 3  # within each other
# Of the globals of modules, most; the numbers among them are told by the code that sets them.
_NO_STATE = (
    *(types.BuiltinFunctionType, types.ModuleType, enum.EnumMeta),
    *(str, bytes, int, float, complex, bool, tuple, frozenset, type(None)),
)


class Change(NamedTuple):
    """What a trace has made of what a package keeps at one place.

    Attributes:
      where: The place, in words.
      is_counted: Whether it will be another one at each call: a number, a tensor or a state in the place of another.
      set_back: Makes it what it was.
    """

    where: str
    is_counted: bool
    set_back: Callable[[], None]


class _Kept(NamedTuple):
    """What a package keeps at one place.

    Attributes:
      names: The global of its module, and attributes that lead there; others that lead to the same object.
      module: The first of these modules.
      seen: Returns which change there is, None for none.
    """

    names: list[tuple[str, ...]]
    module: str
    seen: Callable[[str, Collection[str]], Change | None]


class LibraryState:
    """The state of packages at the moment at which this is made.

    Objects that do not let themselves be looked at are left out.

    Args:
      modules: Of the packages.
    """

    def __init__(self, modules: Iterable[types.ModuleType]) -> None:
        # By the class, which need not be hashable; kept alive beside it.
        self._kinds: dict[int, tuple[type, _Kind | None]] = {id(c): (c, None) for c in _NO_STATE}
        self._known: dict[int, _Kept | None] = {}  # by the object
        for module in modules:
            table = vars(module)
            for name, value in list(table.items()):
                self._take(table, (name,), value, str(table.get("__name__")))

    def changes(self, names: Collection[str]) -> list[Change]:
        """Return what has changed since, as far as code led there by names."""
        found = []
        for kept in self._known.values():
            # The last name alone: objects have others by which code comes to them.
            if kept is None or not any(way[-1] in names for way in kept.names):
                continue
            # Of what a package's objects do when they are asked.
            with contextlib.suppress(Exception):
                change = kept.seen(f"'{'.'.join(kept.names[0])}' of {kept.module}", names)
                found += [] if change is None else [change]
        return found

    def _take(
        self, holder: dict[str, Any], names: tuple[str, ...], value: Any, module: str
    ) -> None:
        cls = type(value)
        known_kind = self._kinds.get(id(cls))
        if known_kind is None:
            kind = None
            with contextlib.suppress(Exception):  # of a metaclass
                kind = _kind_of(cls)
            known_kind = self._kinds[id(cls)] = cls, kind
        kind = known_kind[1]
        if kind is None or (kind is _seen_function and _holds_nothing(value)):
            return
        if id(value) in self._known:
            if (known := self._known[id(value)]) is not None:
                known.names.append(names)
            return
        self._known[id(value)] = None
        if len(names) > _MOST_HOLDERS:
            return
        held: Iterable[tuple[str, Any]] = ()
        with contextlib.suppress(Exception):  # of a class that answers in its own way
            seen: _Seen | None
            if kind is _seen_count:
                seen = _seen_count(holder, names[-1], value)
            elif kind is _seen_class:
                seen, held = self._of_class(value, module)
            else:
                seen, held = kind(value), _held_by(value, names[-1])
            if seen is not None:
                self._known[id(value)] = _Kept([names], module, seen)
        attributes = attributes_of(value) or {}
        for name, each in held:
            self._take(attributes, (*names, name), each, module)

    def _of_class(self, cls: type, module: str) -> tuple[_Seen | None, list[tuple[str, Any]]]:
        """Return what counts of a class that is of this module: what it holds besides its code."""
        if cls.__module__ != module:
            return None, []
        held = [
            (name, value)
            for name, value in type.__getattribute__(cls, "__dict__").items()
            if type(value) not in _OF_CODE and name[:2] != "__"
        ]
        return (_seen_class(cls, dict(held)) if held else None), held


def changes_of_globals(
    before: Mapping[str, Any], table: dict[str, Any], names: Iterable[str]
) -> Iterator[Change]:
    """Return what has changed of the globals that a module had before."""
    for name in names:
        if name in before and name in table and table[name] is not before[name]:
            yield Change(
                f"'{name}' of {table.get('__name__')}",
                is_another_count(before[name], table[name]),
                functools.partial(table.__setitem__, name, before[name]),
            )


def is_counted(cls: type) -> bool:
    """Tell whether values of a class may be counts or averages, and not flags that something was done."""
    return issubclass(cls, (int, float, complex, *_OF_TRACES)) and cls is not bool


def is_another_count(before: Any, now: Any) -> bool:
    """Tell whether a number or a tensor has taken the place of another one."""
    if now is before or not (is_counted(type(before)) and is_counted(type(now))):
        return False
    if isinstance(before, _OF_TRACES) or isinstance(now, _OF_TRACES):
        return True
    return bool((type(now), now) != (type(before), before))


_OF_TRACES = torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool


_Seen = Callable[[str, Collection[str]], "Change | None"]
# Of an object; None where nothing of it counts.
_Kind = Callable[..., "_Seen | None"]
# Of what a class holds.
_OF_CODE = frozenset(
    {types.FunctionType, staticmethod, classmethod, property, str, types.MemberDescriptorType}
    | {types.GetSetDescriptorType, functools.cached_property, tuple, type}
)


def _holds_nothing(function: types.FunctionType) -> bool:
    return (
        function.__closure__ is None
        and not function.__dict__
        and (
            function.__defaults__ is None
            or all(type(d) in _NO_STATE for d in function.__defaults__)
        )
        and function.__kwdefaults__ is None
    )


def _held_by(value: Any, name: str) -> list[tuple[str, Any]]:
    """Return what an object, a table or a function holds, under the names by which code comes there."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in _cells_of(value)]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        wrapped = value.__dict__.get("__wrapped__")
        return [(name, each) for each in (*cells, *defaults, wrapped)]
    if isinstance(value, (dict, list, collections.deque)):
        items = list(dict.values(value)) if isinstance(value, dict) else list(value)
        is_of_texts = len(items) > _MOST_ITEMS or not items or type(items[0]) in _PLAIN
        return [] if is_of_texts else [(name, each) for each in items]
    slots = [(slot, slot_of(value, slot)) for slot in slots_of(value)]
    return [*slots, *(attributes_of(value) or {}).items()]


_EMPTY = types.CellType()


def _cells_of(function: types.FunctionType) -> list[types.CellType]:
    """Return the cells of what a function closes over that hold something."""
    return [cell for cell in function.__closure__ or () if cell != _EMPTY]


# Of which tables hold nothing else.
_PLAIN = (str, type, int, float, tuple, types.FunctionType)


def _kind_of(cls: type) -> _Kind | None:
    """Return how what counts of objects of a class is seen; None for nothing."""
    if issubclass(cls, random.Random):
        return None if issubclass(cls, random.SystemRandom) else _seen_random
    numpy = sys.modules.get("numpy")
    if numpy and issubclass(cls, (numpy.random.Generator, numpy.random.RandomState)):
        return _seen_bits
    if issubclass(cls, torch.Tensor):
        return _seen_tensor
    if cls is itertools.count:
        return _seen_count
    if issubclass(cls, type):
        return _seen_class
    if cls is types.FunctionType:
        return _seen_function
    if issubclass(cls, dict):
        return _seen_table
    if issubclass(cls, (list, collections.deque)):
        return _seen_list
    if issubclass(cls, set):
        return _seen_set
    return _seen_attributes if is_of_library(cls) else None


def _told(read: Callable[[], Any], write: Callable[[Any], Any]) -> _Seen:
    """Watch a state that is told and written as a whole."""
    before = read()

    def seen(where: str, _: Collection[str]) -> Change | None:
        if is_equal(read(), before):
            return None
        return Change(where, True, lambda: write(before))

    return seen


def _seen_random(generator: random.Random) -> _Seen:
    return _told(generator.getstate, generator.setstate)


def _seen_bits(generator: Any) -> _Seen:
    """Watch a generator of NumPy; one of the earlier kind has one of the later kind's within."""
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    return _told(lambda: copy.deepcopy(bits.state), functools.partial(setattr, bits, "state"))


def _seen_tensor(tensor: torch.Tensor) -> _Seen | None:
    """Watch what a small tensor holds: a trace writes to one that it does not know as it stands."""
    if tensor.numel() * tensor.element_size() > _MOST_BYTES or tensor.device.type != "cpu":
        return None
    with outside_of_modes(), torch.no_grad():
        before = tensor.detach().clone()
    version = tensor._version

    def seen(where: str, _: Collection[str]) -> Change | None:
        if tensor._version == version:
            return None

        def set_back() -> None:
            with outside_of_modes(), torch.no_grad():
                tensor.copy_(before)

        return Change(where, True, set_back)

    return seen


def _seen_count(holder: dict[str, Any], name: str, count: Any) -> _Seen:
    """Watch a count; nobody can set one back, so that another one takes its place."""
    before = copy.copy(count)

    def seen(where: str, _: Collection[str]) -> Change | None:
        if repr(count) == repr(before):
            return None
        return Change(where, True, functools.partial(holder.__setitem__, name, before))

    return seen


def _seen_table(table: dict[Any, Any]) -> _Seen | None:
    return _seen_items(table, lambda _, __: True) if dict.__len__(table) <= _MOST_ITEMS else None


def _seen_attributes(value: Any) -> _Seen | None:
    """Watch the attributes of an object that code names, or the slots of one without attributes."""
    attributes, slots = attributes_of(value), slots_of(value)
    if attributes is not None:
        return _seen_items(attributes, _is_named)
    if not slots:
        return None
    return _seen_fields(
        {name: slot_of(value, name) for name in slots},
        functools.partial(slot_of, value),
        functools.partial(object.__setattr__, value),
    )


def _seen_class(cls: type, held: dict[str, Any]) -> _Seen:
    """Watch the attributes of a class that code names."""
    table = type.__getattribute__(cls, "__dict__")
    return _seen_fields(held, table.get, functools.partial(type.__setattr__, cls))


def _seen_function(function: types.FunctionType) -> _Seen | None:
    """Watch what a function closes over; or else its attributes."""
    cells = _cells_of(function)
    if not cells:
        others = function.__dict__.keys() - {"__wrapped__"}
        return _seen_items(function.__dict__, _is_named) if others else None
    before = [cell.cell_contents for cell in cells]

    def seen(where: str, _: Collection[str]) -> Change | None:
        now = [cell.cell_contents for cell in cells]
        if all(a is b for a, b in zip(now, before, strict=True)):
            return None

        def set_back() -> None:
            for cell, content in zip(cells, before, strict=True):
                cell.cell_contents = content

        return Change(where, any(map(is_another_count, before, now)), set_back)

    return seen


def _seen_fields(
    before: dict[str, Any], read: Callable[[str], Any], write: Callable[[str, Any], None]
) -> _Seen:
    def seen(where: str, names: Collection[str]) -> Change | None:
        differing = [n for n, value in before.items() if n in names and read(n) is not value]
        if not differing:
            return None

        def set_back() -> None:
            for name in differing:
                write(name, before[name])

        counted = any(is_another_count(before[name], read(name)) for name in differing)
        return Change(f"{where} ({', '.join(differing)})", counted, set_back)

    return seen


def _is_named(name: str, names: Collection[str]) -> bool:
    return name in names


def _seen_items(table: dict[Any, Any], counts: Callable[[Any, Collection[str]], bool]) -> _Seen:
    before = dict(dict.items(table))

    def seen(where: str, names: Collection[str]) -> Change | None:
        now = dict(dict.items(table))
        others = {k: v for k, v in now.items() if k not in before or before[k] is not v}
        gone = before.keys() - now.keys()
        differing = [k for k in (*others, *gone) if counts(k, names)]
        if not differing:
            return None

        def set_back() -> None:
            for key in differing:
                if key in before:
                    dict.__setitem__(table, key, before[key])
                else:
                    dict.pop(table, key, None)

        pairs = [(before.get(key), now.get(key)) for key in differing]
        return Change(where, any(is_another_count(*pair) for pair in pairs), set_back)

    return seen


def _seen_set(items: set[Any]) -> _Seen | None:
    if set.__len__(items) > _MOST_ITEMS:
        return None
    before = set.copy(items)

    def seen(where: str, _: Collection[str]) -> Change | None:
        if set.__eq__(items, before):
            return None

        def set_back() -> None:
            set.intersection_update(items, before)
            set.update(items, before)

        return Change(where, False, set_back)

    return seen


def _seen_list(items: Any) -> _Seen | None:
    """Watch a list or a queue; of numbers, those that come count too."""
    kind: Any = list if isinstance(items, list) else collections.deque
    if kind.__len__(items) > _MOST_ITEMS:
        return None
    before = list(kind.__iter__(items))

    def seen(where: str, _: Collection[str]) -> Change | None:
        now = list(kind.__iter__(items))
        if len(now) == len(before):
            if all(a is b for a, b in zip(now, before, strict=True)):
                return None
            counted = any(map(is_another_count, before, now))
        else:
            counted = all(is_counted(type(item)) for item in (*before, *now))

        def set_back() -> None:
            kind.clear(items)
            kind.extend(items, before)

        return Change(where, counted, set_back)

    return seen
