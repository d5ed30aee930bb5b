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
import gc
import itertools
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ortrain.capture.library_reads import attributes_of, is_of_library, slot_of, slots_of
from ortrain.capture.shallow_copies import forget_classes_of_traces, is_equal
from ortrain.capture.torch_internals import outside_of_modes

_MOST_ITEMS = 1024
_MOST_BYTES = 1 << 24  # of a tensor or an array


# Of the globals of modules, most; the numbers among them are told by the code that sets them.
NO_STATE = (
    *(types.BuiltinFunctionType, types.ModuleType, enum.EnumMeta),
    *(str, bytes, int, float, complex, bool, frozenset, type(None)),
)
_OF_NO_STATE = frozenset(map(id, NO_STATE))
_UNSET = object()
_LruCache: Any = type(functools.lru_cache(len))


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
    *(collections.UserDict, collections.UserList, collections.ChainMap),
    *(weakref.WeakKeyDictionary,),
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
            function.__defaults__ is None
            or all(id(type(d)) in _OF_NO_STATE for d in function.__defaults__)
        )
        and function.__kwdefaults__ is None
    )


def held_by(value: Any, name: str) -> list[tuple[str, Any]]:
    """Return what an object, a table or a function holds, under the names by which code comes there."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in _cells_of(value)]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return [(name, each) for each in (*cells, *defaults)]
    if isinstance(value, (*_BOUND, _LruCache)):
        return [(name, each) for each in _behind(value)]
    if isinstance(value, contextvars.ContextVar):
        return [(name, value.get(None))]
    if isinstance(value, _HOLDERS):
        return [(name, each) for each in (attributes_of(value) or {}).values()]
    if isinstance(value, (dict, list, tuple, collections.deque)):
        items = list(dict.values(value)) if isinstance(value, dict) else list(value)
        if len(items) > _MOST_ITEMS:
            return []
        return [(name, each) for each in items if id(type(each)) not in _OF_NO_STATE]
    return [
        *((slot, slot_of(value, slot)) for slot in slots_of(value)),
        *(attributes_of(value) or {}).items(),
    ]


def _behind(value: Any) -> Iterable[Any]:
    """Return what a bound method, a partial function, a cache or a descriptor stands for, and holds besides."""
    if isinstance(value, _LruCache):
        return value.__wrapped__, *_results_of(value)
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, property):
        return value.fget, value.fset
    return (value.__func__,)


def _results_of(cache: Any) -> Iterator[Any]:
    """Return what a cache of functools keeps; nothing else tells."""
    for each in gc.get_referents(cache):
        # The table of one without a limit; others tell of their results themselves.
        is_table = type(each) is dict and each is not cache.__dict__
        yield from each.values() if is_table else (each,)


_EMPTY = types.CellType()


def _cells_of(function: types.FunctionType) -> list[types.CellType]:
    """Return the cells of what a function closes over that hold something."""
    return [cell for cell in function.__closure__ or () if cell != _EMPTY]


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
    if cls is types.GeneratorType:
        return _seen_generator
    if cls.__module__ in ("builtins", "itertools") and hasattr(cls, "__next__"):
        return _seen_iterator
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
    if cls is _LruCache:
        return _seen_cache
    if issubclass(cls, (*_BOUND, *_HOLDERS, contextvars.ContextVar, tuple)):
        return _seen_elsewhere
    return seen_attributes if issubclass(cls, _NAMESPACES) or is_of_library(cls) else None


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


def _seen_tensor(tensor: torch.Tensor) -> Seen:
    """Watch what a tensor holds: a trace writes to one that it does not know as it stands.

    What a large one held, or one that is elsewhere, is not set back.
    """
    before: torch.Tensor | None = None
    if tensor.numel() * tensor.element_size() <= _MOST_BYTES and tensor.device.type == "cpu":
        with outside_of_modes(), torch.no_grad():
            before = tensor.detach().clone()
    version = tensor._version

    def seen(where: str, _: Container[str]) -> Change | None:
        return None if tensor._version == version else Change(where, True, set_back)

    def set_back() -> None:
        if before is not None:
            with outside_of_modes(), torch.no_grad():
                tensor.copy_(before)

    return seen


def _seen_array(array: Any) -> Seen | None:
    """Watch what an array of NumPy holds."""
    if array.nbytes > _MOST_BYTES or not array.flags.writeable:
        return None
    told = type(array).__mro__[-2].tobytes  # a subclass may have its own
    before, bytes_before = array.copy(), told(array)

    def set_back() -> None:
        array[...] = before

    def seen(where: str, _: Container[str]) -> Change | None:
        # Of objects these are addresses.
        return None if told(array) == bytes_before else Change(where, True, set_back)

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


def _seen_cache(cache: Any) -> Seen | None:
    """Watch a cache of functools that is empty; of others nothing can be taken out."""
    if cache.cache_info().currsize:
        return None

    def seen(where: str, _: Container[str]) -> Change | None:
        return Change(where, False, cache.cache_clear) if cache.cache_info().currsize else None

    return seen


def _seen_elsewhere(_: Any) -> None:
    """Watch nothing of an object itself: what it holds is watched."""


def seen_count(holders: list[Any], count: Any) -> Seen:
    """Watch a count; nobody can set one back, so that another one takes its place wherever it is held."""
    before = copy.copy(count)

    def set_back() -> None:
        for holder in holders:
            _replace(holder, count, before)

    def seen(where: str, _: Container[str]) -> Change | None:
        return None if repr(count) == repr(before) else Change(where, True, set_back)

    return seen


def _replace(holder: Any, value: Any, by: Any) -> None:
    """Put another object where one is held by a table, a list, a class, a function or a partial function."""

    def replaced(items: Iterable[Any]) -> list[Any]:
        return [by if item is value else item for item in items]

    if isinstance(holder, dict):
        for key in [key for key, item in dict.items(holder) if item is value]:
            dict.__setitem__(holder, key, by)
    elif isinstance(holder, list):
        holder[:] = replaced(holder)
    elif isinstance(holder, type):
        for name in [n for n, item in vars(holder).items() if item is value]:
            type.__setattr__(holder, name, by)
    elif isinstance(holder, types.FunctionType):
        for cell in _cells_of(holder):
            if cell.cell_contents is value:
                cell.cell_contents = by
        if holder.__defaults__:
            holder.__defaults__ = tuple(replaced(holder.__defaults__))
        _replace(holder.__kwdefaults__ or {}, value, by)
        _replace(holder.__dict__, value, by)
    elif isinstance(holder, functools.partial):
        args, state = tuple(replaced(holder.args)), vars(holder)
        _replace(holder.keywords, value, by)
        holder.__setstate__((holder.func, args, holder.keywords, state))  # type: ignore[attr-defined]


def _seen_generator(generator: types.GeneratorType[Any, Any, Any]) -> Seen:
    """Watch where a generator stands, which nobody can set back."""
    step, before = _state_of(generator)

    def seen(where: str, _: Container[str]) -> Change | None:
        step_now, now = _state_of(generator)
        is_there = step_now == step and len(now) == len(before)
        if is_there and all(a is b for a, b in zip(now, before, strict=True)):
            return None
        return Change(where, True, _nothing)

    return seen


def _state_of(generator: types.GeneratorType[Any, Any, Any]) -> tuple[int, list[Any]]:
    frame = generator.gi_frame
    return (-2, []) if frame is None else (frame.f_lasti, list(frame.f_locals.values()))


def _seen_iterator(iterator: Any) -> Seen | None:
    """Watch where an iterator of Python's stands; not all can be set back."""
    reduced = iterator.__reduce__()
    before = _place_of(reduced)
    index = reduced[2] if len(reduced) > 2 and isinstance(reduced[2], int) else None

    def seen(where: str, _: Container[str]) -> Change | None:
        if _place_of(iterator.__reduce__()) == before:
            return None
        back = _nothing if index is None else functools.partial(iterator.__setstate__, index)
        return Change(where, True, back)

    return seen


def _place_of(part: Any) -> Any:
    """Return what tells where an iterator stands, of a part of what copies it."""
    if isinstance(part, tuple):
        return tuple(map(_place_of, part))
    if isinstance(part, (int, list)):
        return part if isinstance(part, int) else len(part)
    is_iterator = hasattr(type(part), "__next__") and hasattr(part, "__reduce__")
    if is_iterator and type(part).__module__ in ("builtins", "itertools"):
        return _place_of(part.__reduce__())
    return id(part)


def _nothing() -> None:
    pass


def _seen_table(table: dict[Any, Any]) -> Seen | None:
    return _seen_items(table, None) if dict.__len__(table) <= _MOST_ITEMS else None


def seen_attributes(attributes: dict[str, Any]) -> Seen:
    """Watch the attributes of an object that code names."""
    return _seen_items(attributes, _is_named)


def seen_slots(value: Any) -> Seen | None:
    """Watch what is in the slots of an object that code names."""
    before = {name: slot_of(value, name, _UNSET) for name in slots_of(value)}

    def write(name: str, content: Any) -> None:
        if content is not _UNSET:
            object.__setattr__(value, name, content)
        elif slot_of(value, name, _UNSET) is not _UNSET:
            object.__delattr__(value, name)

    return (
        _seen_fields(before, lambda name: slot_of(value, name, _UNSET), write) if before else None
    )


def seen_class(cls: type, held: dict[str, Any]) -> Seen:
    """Watch the attributes of a class that code names, those that come to be there too.

    Args:
      held: Those that may change.
    """
    table = type.__getattribute__(cls, "__dict__")
    known = set(table)

    def write(name: str, content: Any) -> None:
        if content is _UNSET:
            type.__delattr__(cls, name)
        else:
            type.__setattr__(cls, name, content)

    def seen(where: str, names: Container[str]) -> Change | None:
        made = {name: _UNSET for name in table if name not in known and name[:2] != "__"}
        read = functools.partial(_item, table)
        return _seen_fields({**held, **made}, read, write)(where, names)

    return seen


def _item(table: Mapping[str, Any], name: str) -> Any:
    return table.get(name, _UNSET)


def seen_function(function: types.FunctionType) -> Seen | None:
    """Watch what a function closes over."""
    cells = _cells_of(function)
    if not cells:
        return None
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


def _seen_items(
    table: dict[Any, Any], counts: Callable[[Any, Container[str]], bool] | None
) -> Seen:
    """Watch a table.

    Args:
      table: It.
      counts: Tells whether an item counts, given the names in code; None where all do, and their order.
    """
    kind: Any = collections.OrderedDict if isinstance(table, collections.OrderedDict) else dict
    before = dict(kind.items(table))

    def seen(where: str, names: Container[str]) -> Change | None:
        forget_classes_of_traces(table, before)
        now = dict(kind.items(table))
        others = {k: v for k, v in now.items() if k not in before or before[k] is not v}
        gone = before.keys() - now.keys()
        differing = [k for k in (*others, *gone) if counts is None or counts(k, names)]
        is_moved = counts is None and [k for k in now if k in before] != [
            k for k in before if k in now
        ]
        if not differing and not is_moved:
            return None

        def set_back() -> None:
            for key in differing:
                if key in before:
                    kind.__setitem__(table, key, before[key])
                else:
                    kind.pop(table, key, None)
            others = {k: v for k, v in kind.items(table) if k not in before}
            if list(kind.keys(table)) != [*before, *others]:
                in_order = {k: kind.__getitem__(table, k) for k in before}
                kind.clear(table)
                for key, value in (in_order | others).items():
                    kind.__setitem__(table, key, value)

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
