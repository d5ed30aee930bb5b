# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Objects whose state nobody can compare or set back: open files, queues, cursors, whatever compiled code has made.

A class written in Python keeps its state in attributes, slots and containers, all of which can be looked at. Of
classes made by compiled code only those are known that are listed here.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import datetime
import decimal
import functools
import operator
import random
import re
import sys
import threading
import types
import weakref
from typing import Any

import torch

from ortrain.capture.class_facts import is_made_by_a_statement
from ortrain.capture.outside_reads import is_told_by
from ortrain.capture.process_facts import fact_of

_DESCRIPTORS = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)
LOCK = type(threading.Lock())
_DATA_OF_C: Any = ctypes.c_int.__mro__[-2]
# Whose bytes are an address: what stands there, or a function does, may change.
_ADDRESSES: tuple[Any, ...] = (
    *(ctypes._Pointer, ctypes._CFuncPtr, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_wchar_p),
    ctypes.py_object,
)
_FIELD = type(collections.namedtuple("_Pair", "a").a)  # type: ignore[attr-defined]
_KNOWN: tuple[Any, ...] = (
    *(list, tuple, dict, set, frozenset, int, float, complex, str, bytes, type(None), type(...)),
    *(bytearray, memoryview, array.array, ctypes.Array, ctypes.Structure, ctypes.Union),
    *(_DATA_OF_C, type(NotImplemented), range, slice, type, property, super),
    *(staticmethod, classmethod, BaseException, types.FunctionType, types.BuiltinFunctionType),
    *(types.MethodType, types.MethodWrapperType, types.ClassMethodDescriptorType, *_DESCRIPTORS),
    *(types.MappingProxyType, types.SimpleNamespace, types.ModuleType, types.CellType),
    *(types.CodeType, types.GenericAlias, types.UnionType, type({}.keys()), type({}.values())),
    *(type({}.items()), collections.deque, collections.OrderedDict, collections.defaultdict),
    *(functools.partial, type(functools.lru_cache(len)), functools.cached_property, weakref.ref),
    *(*weakref.ProxyTypes, contextvars.ContextVar, random.Random.__mro__[1], re.Pattern, re.Match),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller, threading.local, LOCK),
    *(_FIELD, type(threading.RLock()), torch.Tensor, torch.dtype, torch.device, torch.layout),
    *(torch.memory_format, torch.Size, torch.Generator, torch.finfo, torch.iinfo),
)
OF_CYTHON = "cython_function_or_method"
_OF_NUMPY = ("ndarray", "generic", "dtype", "ufunc", "Generator", "finfo", "iinfo")
# Written in Python, but their state is not all there is, or others change it at any time.
_MOVING = (
    *(
        "_pyio",
        "asyncio",
        "concurrent",
        "multiprocessing",
        "queue",
        "socket",
        "subprocess",
        "threading",
    ),
    *("torch.amp", "torch.cuda.amp", "torch.optim", "torch.profiler", "torch.utils.data"),
    "torch.utils.tensorboard",
)
_found: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def is_opaque(value: Any) -> bool:
    """Tell whether an object has a state that nobody can compare or set back, or tells of one."""
    cls = type(value)
    known = _found.get(cls)
    if known is None:
        known = _found[cls] = _makes_opaque_objects(cls)
    if cls is operator.attrgetter:
        return any(map(is_told_by, value.__reduce__()[1]))
    return known or fact_of(value) != ""


def _makes_opaque_objects(cls: type) -> bool:
    if issubclass(cls, random.SystemRandom):
        return True
    if issubclass(cls, _DATA_OF_C):
        return _holds_addresses(cls)
    if cls.__name__ == OF_CYTHON:  # as stateless as other compiled functions
        return False
    if issubclass(cls, _known_classes()):
        bases = [b for b in cls.__mro__ if not issubclass(b, _known_classes())]
    else:
        bases = list(cls.__mro__)
    for base in bases:
        if base is object:
            continue
        if _is_within(base.__module__, _MOVING) and not issubclass(base, (LOCK, threading.local)):
            return True
        if _is_compiled(base) and not base.__module__.startswith("torch."):
            return True
    return False


def _holds_addresses(cls: Any) -> bool:
    """Tell whether an object of ctypes is, or has a part that is, an address."""
    if issubclass(cls, _ADDRESSES):
        return True
    if issubclass(cls, ctypes.Array):
        return _holds_addresses(cls._type_)
    fields = [field for base in cls.__mro__ for field in vars(base).get("_fields_", ())]
    return any(_holds_addresses(field[1]) for field in fields)


def _known_classes() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return _KNOWN
    return _KNOWN + _classes_of_numpy(numpy)


@functools.cache
def _classes_of_numpy(numpy: types.ModuleType) -> tuple[type, ...]:
    random_state = numpy.random.RandomState
    return (*(getattr(numpy, n, numpy.random.Generator) for n in _OF_NUMPY), random_state)


def _is_compiled(cls: type) -> bool:
    """Tell whether compiled code has made a class, and not a class statement."""
    if not is_made_by_a_statement(cls):
        return True
    slots = cls.__dict__.get("__slots__", ())
    names = {slots} if isinstance(slots, str) else set(slots)
    own = {"__dict__", "__weakref__", *names, *(f"_{cls.__name__.lstrip('_')}{n}" for n in names)}
    return any(
        isinstance(value, _DESCRIPTORS) and value.__objclass__ is cls and name not in own
        for name, value in cls.__dict__.items()
    )


def _is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
