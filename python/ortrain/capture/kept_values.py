# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""How a change of what an installed package keeps in one object is seen, and set back."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import copy
import enum
import functools
import itertools
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import torch

from ortrain.capture.library_reads import attributes_of, is_of_library, slot_of, slots_of
from ortrain.capture.shallow_copies import is_equal
from ortrain.capture.torch_internals import outside_of_modes

_MOST_ITEMS = 1024
_MOST_BYTES = 1 << 22  # of a tensor or an array


# Of the globals of modules, most; the numbers among them are told by the code that sets them.
NO_STATE = (
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


def is_counted(cls: type) -> bool:
    """Tell whether values of a class may be counts or averages, and not flags that something was done."""
    if (numpy := sys.modules.get("numpy")) and issubclass(cls, (numpy.number, numpy.ndarray)):
        return True
    return issubclass(cls, (int, float, complex, *_OF_TRACES)) and cls is not bool


def is_another_count(before: Any, now: Any) -> bool:
    """Tell whether a number or a tensor has taken the place of another one."""
    if now is before or not (is_counted(type(before)) and is_counted(type(now))):
        return False
    if any(isinstance(each, _OF_TRACES) or hasattr(each, "__array__") for each in (before, now)):
        return True
    return bool((type(now), now) != (type(before), before))


_OF_TRACES = torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool


Seen = Callable[[str, Container[str]], "Change | None"]


class _AnyName:
    def __contains__(self, _: object) -> bool:
        return True


ANY_NAME = _AnyName()
# Of an object; None where nothing of it counts.
Kind = Callable[..., "Seen | None"]
# Of what a class holds: neither code nor what changes.
_FIXED = (str, tuple, type, types.MemberDescriptorType, types.GetSetDescriptorType)
# Python's own, whose code names no attributes of theirs, and others, of which the user's does.
_HOLDERS = (
    *(collections.UserDict, collections.UserList, weakref.WeakKeyDictionary),
    *(weakref.WeakValueDictionary, weakref.WeakSet),
)
_NAMESPACES = types.SimpleNamespace, argparse.Namespace, threading.local
_BOUND = types.MethodType, functools.partial, staticmethod, classmethod, property


def held_by_class(cls: type) -> dict[str, Any]:
    """Return what a class holds that may change, or behind which something may."""
    held = {}
    for name, value in type.__getattribute__(cls, "__dict__").items():
        kind = type(value)
        if kind in _FIXED or kind is functools.cached_property:
            continue
        if kind is types.FunctionType or kind in _BOUND[2:]:
            functions = (value,) if kind is types.FunctionType else _behind(value)
            if all(f is None or holds_nothing(f) for f in functions):
                continue
        elif name[:2] == "__":
            continue
        held[name] = value
    return held


def holds_nothing(function: Any) -> bool:
    """Tell whether there is nothing behind a function that may change."""
    if type(function) is not types.FunctionType:
        return False
    return (
        function.__closure__ is None
        and not function.__dict__
        and (
            function.__defaults__ is None or all(type(d) in NO_STATE for d in function.__defaults__)
        )
        and function.__kwdefaults__ is None
    )


def held_by(value: Any, name: str) -> list[tuple[str, Any]]:
    """Return what an object, a table or a function holds, under the names by which code comes there."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in _cells_of(value)]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        wrapped = value.__dict__.get("__wrapped__")
        return [(name, each) for each in (*cells, *defaults, wrapped)]
    if isinstance(value, _BOUND):
        return [(name, each) for each in _behind(value)]
    if isinstance(value, contextvars.ContextVar):
        return [(name, value.get(None))]
    if isinstance(value, _HOLDERS):
        return [(name, each) for each in (attributes_of(value) or {}).values()]
    if isinstance(value, (dict, list, collections.deque)):
        items = list(dict.values(value)) if isinstance(value, dict) else list(value)
        is_of_texts = len(items) > _MOST_ITEMS or not items or type(items[0]) in _PLAIN
        return [] if is_of_texts else [(name, each) for each in items]
    slots = [(slot, slot_of(value, slot)) for slot in slots_of(value)]
    return [*slots, *(attributes_of(value) or {}).items()]


def _behind(value: Any) -> Iterable[Any]:
    """Return what a bound method, a partial function or a descriptor stands for, and holds besides."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, property):
        return value.fget, value.fset
    return (value.__func__,)


_EMPTY = types.CellType()


def _cells_of(function: types.FunctionType) -> list[types.CellType]:
    """Return the cells of what a function closes over that hold something."""
    return [cell for cell in function.__closure__ or () if cell != _EMPTY]


# Of which tables hold nothing else.
_PLAIN = (str, type, int, float, tuple, types.FunctionType)


def kind_of(cls: type) -> Kind | None:
    """Return how what counts of objects of a class is seen; None for nothing."""
    if issubclass(cls, random.Random):
        return None if issubclass(cls, random.SystemRandom) else _seen_random
    numpy = sys.modules.get("numpy")
    if numpy and issubclass(cls, (numpy.random.Generator, numpy.random.RandomState)):
        return _seen_bits
    if numpy and issubclass(cls, numpy.ndarray):
        return _seen_array
    if issubclass(cls, (array.array, bytearray)):
        return _seen_buffer
    if issubclass(cls, torch.Tensor):
        return _seen_tensor
    if cls is itertools.count:
        return seen_count
    if issubclass(cls, type):
        return seen_class
    if cls is types.FunctionType:
        return seen_function
    if issubclass(cls, dict):
        return _seen_table
    if issubclass(cls, (list, collections.deque)):
        return _seen_list
    if issubclass(cls, set):
        return _seen_set
    if issubclass(cls, (*_BOUND, *_HOLDERS, contextvars.ContextVar)):
        return _seen_elsewhere
    return _seen_attributes if issubclass(cls, _NAMESPACES) or is_of_library(cls) else None


def _told(read: Callable[[], Any], write: Callable[[Any], Any]) -> Seen:
    """Watch a state that is told and written as a whole."""
    before = read()

    def seen(where: str, _: Container[str]) -> Change | None:
        if is_equal(read(), before):
            return None
        return Change(where, True, lambda: write(before))

    return seen


def _seen_random(generator: random.Random) -> Seen:
    return _told(generator.getstate, generator.setstate)


def _seen_bits(generator: Any) -> Seen:
    """Watch a generator of NumPy; one of the earlier kind has one of the later kind's within."""
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    return _told(lambda: copy.deepcopy(bits.state), functools.partial(setattr, bits, "state"))


def _seen_tensor(tensor: torch.Tensor) -> Seen | None:
    """Watch what a small tensor holds: a trace writes to one that it does not know as it stands."""
    if tensor.numel() * tensor.element_size() > _MOST_BYTES or tensor.device.type != "cpu":
        return None
    with outside_of_modes(), torch.no_grad():
        before = tensor.detach().clone()
    version = tensor._version

    def seen(where: str, _: Container[str]) -> Change | None:
        if tensor._version == version:
            return None

        def set_back() -> None:
            with outside_of_modes(), torch.no_grad():
                tensor.copy_(before)

        return Change(where, True, set_back)

    return seen


def _seen_array(array: Any) -> Seen | None:
    """Watch what an array of NumPy holds."""
    if array.nbytes > _MOST_BYTES or array.dtype.hasobject or not array.flags.writeable:
        return None
    before = array.copy()

    def set_back() -> None:
        array[...] = before

    def seen(where: str, _: Container[str]) -> Change | None:
        if array.tobytes() == before.tobytes():
            return None
        return Change(where, True, set_back)

    return seen


def _seen_buffer(buffer: Any) -> Seen | None:
    if memoryview(buffer).nbytes > _MOST_BYTES:
        return None
    before = buffer[:]

    def seen(where: str, _: Container[str]) -> Change | None:
        if bytes(buffer) == bytes(before):
            return None
        return Change(where, True, functools.partial(buffer.__setitem__, slice(None), before))

    return seen


def _seen_elsewhere(_: Any) -> None:
    """Watch nothing of an object itself: what it holds is watched."""


def seen_count(holder: dict[str, Any], name: str, count: Any) -> Seen:
    """Watch a count; nobody can set one back, so that another one takes its place."""
    before = copy.copy(count)

    def seen(where: str, _: Container[str]) -> Change | None:
        if repr(count) == repr(before):
            return None
        return Change(where, True, functools.partial(holder.__setitem__, name, before))

    return seen


def _seen_table(table: dict[Any, Any]) -> Seen | None:
    return _seen_items(table, lambda _, __: True) if dict.__len__(table) <= _MOST_ITEMS else None


def _seen_attributes(value: Any) -> Seen | None:
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


def seen_class(cls: type, held: dict[str, Any]) -> Seen:
    """Watch the attributes of a class that code names."""
    table = type.__getattribute__(cls, "__dict__")
    return _seen_fields(held, table.get, functools.partial(type.__setattr__, cls))


def seen_function(function: types.FunctionType) -> Seen | None:
    """Watch what a function closes over; or else its attributes."""
    cells = _cells_of(function)
    if not cells:
        others = function.__dict__.keys() - {"__wrapped__"}
        return _seen_items(function.__dict__, _is_named) if others else None
    before = [cell.cell_contents for cell in cells]

    def seen(where: str, _: Container[str]) -> Change | None:
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
) -> Seen:
    def seen(where: str, names: Container[str]) -> Change | None:
        differing = [n for n, value in before.items() if n in names and read(n) is not value]
        if not differing:
            return None

        def set_back() -> None:
            for name in differing:
                write(name, before[name])

        counted = any(is_another_count(before[name], read(name)) for name in differing)
        return Change(f"{where} ({', '.join(differing)})", counted, set_back)

    return seen


def _is_named(name: str, names: Container[str]) -> bool:
    return name in names


def _seen_items(table: dict[Any, Any], counts: Callable[[Any, Container[str]], bool]) -> Seen:
    before = dict(dict.items(table))

    def seen(where: str, names: Container[str]) -> Change | None:
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


def _seen_set(items: set[Any]) -> Seen | None:
    if set.__len__(items) > _MOST_ITEMS:
        return None
    before = set.copy(items)

    def seen(where: str, _: Container[str]) -> Change | None:
        if set.__eq__(items, before):
            return None

        def set_back() -> None:
            set.intersection_update(items, before)
            set.update(items, before)

        return Change(where, False, set_back)

    return seen


def _seen_list(items: Any) -> Seen | None:
    """Watch a list or a queue; of numbers, those that come count too."""
    kind: Any = list if isinstance(items, list) else collections.deque
    if kind.__len__(items) > _MOST_ITEMS:
        return None
    before = list(kind.__iter__(items))

    def seen(where: str, _: Container[str]) -> Change | None:
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
