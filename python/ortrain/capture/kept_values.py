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
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch

from ortrain.capture.cached_functions import LruCache
from ortrain.capture.kept_changes import Change, Seen, cells_of
from ortrain.capture.kept_contents import (
    MOST_ITEMS,
    seen_attributes,
    seen_class,
    seen_function,
    seen_list,
    seen_set,
    seen_table,
)
from ortrain.capture.kept_places import seen_count, seen_generator, seen_iterator
from ortrain.capture.library_reads import attributes_of, is_of_library, slot_of, slots_of
from ortrain.capture.shallow_copies import is_equal
from ortrain.capture.torch_internals import outside_of_modes

_MOST_BYTES = 1 << 24  # of a tensor or an array
# Of the globals of modules, most; the numbers among them are told by the code that sets them.
NO_STATE = (
    *(types.BuiltinFunctionType, types.ModuleType, enum.EnumMeta),
    *(str, bytes, int, float, complex, bool, frozenset, type(None)),
)
_OF_NO_STATE = frozenset(map(id, NO_STATE))
# Of an object; None where nothing of it counts.
Kind = Callable[..., "Seen | None"]
# Of what a class holds: neither code nor what changes.
_FIXED = (str, tuple, type, types.MemberDescriptorType, types.GetSetDescriptorType)
# Python's own, whose code names no attributes of theirs, and others, of which the user's does.
_HOLDERS = (
    *(collections.UserDict, collections.UserList, collections.ChainMap),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
_NAMESPACES = types.SimpleNamespace, argparse.Namespace, threading.local
_IN_CLASSES = staticmethod, classmethod, property, functools.cached_property
_BOUND = types.MethodType, functools.partial, *_IN_CLASSES


def held_by_class(
    cls: type,
) -> tuple[dict[str, Any], list[tuple[str, types.FunctionType]]]:
    """Return what a class holds that may change, or behind which something may, and by name its functions that hold nothing."""
    held, bare = {}, []
    for name, value in type.__getattribute__(cls, "__dict__").items():
        kind = type(value)
        if kind in _FIXED:
            continue
        if kind is types.FunctionType or kind in _IN_CLASSES:
            behind = (value,) if kind is types.FunctionType else _behind(value)
            functions = [function for function in behind if function is not None]
            if all(map(holds_nothing, functions)):
                bare += [(name, function) for function in functions]
                continue
        elif name[:2] == "__":
            continue
        held[name] = value
    return held, bare


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
        cells = [cell.cell_contents for cell in cells_of(value)]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return [(name, each) for each in (*cells, *defaults)]
    if isinstance(value, (*_BOUND, LruCache)):
        return [(name, each) for each in _behind(value)]
    if isinstance(value, contextvars.ContextVar):
        return [(name, value.get(None))]
    if isinstance(value, _HOLDERS):
        return [(name, each) for each in (attributes_of(value) or {}).values()]
    if isinstance(value, (dict, list, tuple, collections.deque)):
        items = list(dict.values(value)) if isinstance(value, dict) else list(value)
        if len(items) > MOST_ITEMS:
            return []
        return [(name, each) for each in items if id(type(each)) not in _OF_NO_STATE]
    return [
        *((slot, slot_of(value, slot)) for slot in slots_of(value)),
        *(attributes_of(value) or {}).items(),
    ]


def _behind(value: Any) -> Iterable[Any]:
    """Return what a bound method, a partial function, a cache or a descriptor stands for, and holds besides."""
    if isinstance(value, LruCache):
        return value.__wrapped__, *_results_of(value)
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, functools.cached_property):
        return (value.func,)
    return (value.__func__,)


def _results_of(cache: Any) -> Iterator[Any]:
    """Return what a cache of functools keeps; nothing else tells."""
    for each in gc.get_referents(cache):
        # The table of one without a limit; others tell of their results themselves.
        is_table = type(each) is dict and each is not cache.__dict__
        yield from each.values() if is_table else (each,)


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
        return seen_generator
    if cls.__module__ in ("builtins", "itertools") and hasattr(cls, "__next__"):
        return seen_iterator
    if issubclass(cls, type):
        return seen_class
    if cls is types.FunctionType:
        return seen_function
    if issubclass(cls, dict):
        return seen_table
    if issubclass(cls, (list, collections.deque)):
        return seen_list
    if issubclass(cls, set):
        return seen_set
    if cls is LruCache:
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
