# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a forward has read of installed packages that somebody may replace or set while a graph is in use.

Functions, methods of classes, numbers, names and tables, in modules, in classes, in objects that modules hold and in
functions. Of functions it counts which ones they are, their code, their defaults and what they close over; of classes
which ones they are.
"""

from __future__ import annotations

import array
import builtins
import collections
import contextvars
import copyreg
import enum
import functools
import sys
import threading
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from ortrain.capture.absent_names import asked_by_text, asked_in_vain, names_of_classes
from ortrain.capture.class_facts import function_behind
from ortrain.capture.names_in_code import globals_of, modules_imported_by
from ortrain.capture.reachable_state import home_of, is_own, named_in
from ortrain.capture.source_files import file_of, is_installed, is_standard
from ortrain.capture.value_digest import attribute_of

# Something with items or attributes (a dictionary, a class, a function, a cell, another object), a name in it, and what
# counts of what stands there: by default all that can be compared; "same": which object it is; "own": that too, of a
# class itself and not of its bases; "stands": that too, what it holds being told by others; "items": which objects
# stand in a table, and in tables within it; "names": which names a class has itself. Of functions, "same", "own" and in
# tables, their parts count as well.
Variable = tuple[Any, str] | tuple[Any, str, str]

_FUNCTIONS = types.FunctionType, functools.partial, type(functools.lru_cache(len))
_NUMBERS = bool, int, float, complex, str, bytes, type(None)
_SETTINGS = torch.dtype, torch.device, torch.memory_format, torch.layout
_TABLES = dict, list, set, types.MappingProxyType, collections.deque, contextvars.ContextVar
_BUFFERS = bytearray, array.array
# Of a function.
PARTS_WITH_TABLES = "__defaults__", "__kwdefaults__", "__closure__"
_MOST_ITEMS = 1024  # of a table and those within it
_MOST_TABLES = 8  # within each other
_MOST_BYTES = 1 << 16  # of an array
# Of each layer, by the guards themselves.
_COMPARED = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__"})
# Whose objects say nothing about what a forward computes, or do so elsewhere.
_OTHERS = "torch", "ortrain", "typing", "logging", "threading", "contextvars"


def library_reads(
    ran: Mapping[types.CodeType, dict[str, Any]],
    naming: Collection[types.CodeType],
    layers: Iterable[type],
    reached: Iterable[type],
) -> Iterator[Variable]:
    """Return what guards compare of installed packages.

    Args:
      ran: Code that has run, with its globals.
      naming: Of it, that which is neither Python's nor PyTorch's.
      layers: The classes of the layers.
      reached: Those of other objects that the module leads to.
    """
    reads = _Reads(ran, naming)
    for code in naming:
        reads.globals_of(code)
    for cls in filter(is_of_library, reached):
        reads.class_of_library(cls)
    classes = set(layers)
    for cls in classes:
        reads.methods_of_layer(cls)
    owners = (_class_of(code, ran[code]) for code in naming if is_installed(code.co_filename))
    for cls in {base for each in (*classes, *filter(None, owners)) for base in each.__mro__}:
        reads.class_(cls)
    yield from reads.found.values()


class _Reads:
    """Collects variables, each once."""

    def __init__(
        self, ran: Mapping[types.CodeType, dict[str, Any]], naming: Iterable[types.CodeType]
    ) -> None:
        self._ran = ran
        self._names = {
            name
            for code in naming
            for name in (*code.co_names, *(c for c in code.co_consts if isinstance(c, str)))
        }
        # That functions may ask for where it is not.
        self._asked = {text for code in naming for text in asked_by_text(code)}
        self._seen: set[int] = set()  # objects and classes that have been looked into
        self.found: dict[tuple[int, str], Variable] = {}

    def _take(self, owner: Any, name: str, value: Any) -> None:
        """Take what stands at a name of an owner, and what code names within it."""
        counts = _what_counts(value)
        if isinstance(value, types.FunctionType) and is_installed(value.__code__.co_filename):
            self._function(value)
        elif counts == "stands" and is_of_library(type(value)):
            self._object(value)
        elif isinstance(value, type) and is_of_library(value):
            self.class_of_library(value)
        self.found.setdefault((id(owner), name), (owner, name, counts) if counts else (owner, name))

    def _take_none(self, owner: Any, name: str) -> None:
        """Take that nothing stands at a name of an owner."""
        counts = "own" if isinstance(owner, type) else "same"
        self.found.setdefault((id(owner), name), (owner, name, counts))

    def globals_of(self, code: types.CodeType) -> None:
        """Take what code may find in its module, and in others that it names or imports."""
        table = self._ran[code]
        home = home_of(table)
        if home is None or vars(home) is not table:  # made by a trace
            return
        is_users = not is_installed(code.co_filename)
        named = globals_of(code)
        for name in named & table.keys():
            value = table[name]
            if isinstance(value, types.ModuleType):
                self._module(value, code)
            if is_users:  # those of the user's own code are compared in any case
                self._within(value)
            else:
                self._take(table, name, value)
        if not is_users:
            for name in named - table.keys() - vars(builtins).keys():
                self._take_none(table, name)
                self._take_none(vars(builtins), name)
        for module in modules_imported_by(code, table):
            self._module(module, code)
        for owner, name, _ in asked_in_vain(code, table):
            self._take_none(owner, name)
        # Somebody may have found it by an import of his own.
        defined = None if is_users else table.get(code.co_name)
        if isinstance(defined, types.FunctionType) and defined.__code__ is code:
            self._take(table, code.co_name, defined)

    def _within(self, value: Any) -> None:
        """Take what code names of an object or a class that is compared in any case."""
        if isinstance(value, type):
            if is_of_library(value):
                self.class_of_library(value)
        elif is_of_library(type(value)) and not isinstance(value, torch.nn.Module):
            self.class_of_library(type(value))

    def _module(self, module: types.ModuleType, code: types.CodeType) -> None:
        """Take what code names of a module that is neither PyTorch's nor the user's."""
        if module.__name__.startswith(("torch", "ortrain")) or is_own(module):
            return
        is_open = not is_standard(file_of(module) or "<frozen>")
        for home, name, held in named_in(module, code.co_names):
            if is_open or isinstance(held, (*_FUNCTIONS, int, float)):
                self._take(home, name, held)

    def methods_of_layer(self, cls: type) -> None:
        """Take the methods that have run of a layer and that its class has from others, `nn.Module` aside."""
        bases = (base for base in cls.__mro__[1:] if base is not torch.nn.Module)
        for name in {name for base in bases for name in self._methods(base)} - vars(cls).keys():
            if isinstance(getattr(cls, name), types.FunctionType):
                self._take(cls, name, getattr(cls, name))

    def _function(self, function: types.FunctionType) -> None:
        """Take the attributes of a function that code names, what `functools.singledispatch` registers with it, and tables.

        Which objects its parts are is compared where the function is.
        """
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        attributes = function.__dict__
        for name in attributes.keys() & {*self._names, "registry"}:
            if not name.startswith("__"):
                self._take(attributes, name, attributes[name])
        for name in PARTS_WITH_TABLES:
            part = getattr(function, name) or ()
            held = [content for item in _items_of(part) for content in _contents_of(item)]
            if any(issubclass(type(each), _TABLES) for each in held):
                counts = "items" if _is_plain_table(part) else "stands"
                self.found.setdefault((id(function), name), (function, name, counts))
            for each in held:
                if is_of_library(type(each)):
                    self._object(each)
        if isinstance(wrapped := attributes.get("__wrapped__"), types.FunctionType):
            self._function(wrapped)

    def _object(self, value: Any) -> None:
        """Take the attributes of an object that code names, of its own and of its class."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        cls = type(value)
        self.class_of_library(cls)
        for name in self._names & set(slots_of(value)):
            self._take(value, name, slot_of(value, name))
        attributes = attributes_of(value)
        if attributes is None:
            return
        for name in self._names & (attributes.keys() | set(dir(cls))):
            if name in attributes:
                self._take(attributes, name, attributes[name])
            elif not name.startswith("__"):  # which those of the class give way to
                self._take_none(attributes, name)
        for name in self._asked - attributes.keys():
            self._take_none(attributes, name)

    def class_of_library(self, cls: type) -> None:
        """Take what code names of a class: what it has itself, and that it hides nothing of its bases."""
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        hidden: set[str] = set()
        for base in reversed([base for base in cls.__mro__ if is_of_library(base)]):
            self.class_(base)
            for name in hidden - vars(base).keys():
                self._take_none(base, name)
            named = {name for name in self._names & vars(base).keys() if name[:2] != "__"}
            hidden |= named.union(self._methods(base))

    def class_(self, cls: type) -> None:
        """Take methods of a class that have run, and of a package's what code names of it."""
        for name in self._methods(cls):
            self.found.setdefault((id(cls), name), (cls, name, "own"))
            function = function_behind(vars(cls)[name])
            if function is not None and is_installed(function.__code__.co_filename):
                self._function(function)
        if not is_of_library(cls):
            return
        for variable in names_of_classes((cls,)):
            self.found.setdefault(variable[:2], variable)
        for name in self._names & vars(cls).keys():
            value = vars(cls)[name]
            if name.startswith("__") or isinstance(value, types.FunctionType):
                continue
            if hasattr(type(value), "__get__"):  # which gives another object each time
                self.found.setdefault((id(cls), name), (cls, name, "own"))
            else:
                self._take(cls, name, value)

    def _methods(self, cls: type) -> Iterator[str]:
        for name, value in list(vars(cls).items()):
            function = _function_behind(value)
            compared = name in _COMPARED and issubclass(cls, torch.nn.Module)
            if function is not None and not compared and function.__code__ in self._ran:
                yield name


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the dictionary of an object's attributes, without running code of its class; None for none."""
    # Those of this thread.
    of_class = threading.local if issubclass(type(value), threading.local) else object
    try:
        attributes = of_class.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return attributes if type(attributes) is dict else None


def slots_of(value: Any) -> tuple[str, ...]:
    """Return the names of an object's slots."""
    return tuple(copyreg._slotnames(type(value)))  # type: ignore[attr-defined]


def slot_of(value: Any, name: str, default: Any = None) -> Any:
    """Return what an object has in a slot, without running code of its class; the default for nothing."""
    for cls in type(value).__mro__:
        slot = vars(cls).get(name)
        if isinstance(slot, types.MemberDescriptorType):
            try:
                return slot.__get__(value)
            except AttributeError:
                return default
    return default


def _what_counts(value: Any) -> str:
    """Return what counts of a value, "" for all."""
    if isinstance(value, (*_FUNCTIONS, type, enum.Enum, types.ModuleType)):
        return "same"
    if is_plain(value) or _is_small_array(value):
        return ""
    # What a proxy says of its class is another's.
    is_table = issubclass(type(value), (*_TABLES, tuple))
    return "items" if is_table and _is_plain_table(value) else "stands"


def is_plain(value: Any) -> bool:
    """Tell whether a value is a number, a name, a setting, or a tuple of such."""
    return isinstance(value, (*_NUMBERS, *_SETTINGS)) or _is_plain_tuple(value)


def _is_plain_tuple(value: Any) -> bool:
    is_tuple = isinstance(value, (tuple, frozenset)) and len(value) <= _MOST_ITEMS
    return is_tuple and all(isinstance(v, _NUMBERS) or _is_plain_tuple(v) for v in value)


def _is_small_array(value: Any) -> bool:
    """Tell whether a value is an array that is compared by its contents."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray:
        return bool(value.nbytes <= _MOST_BYTES and not value.dtype.hasobject)
    return type(value) in _BUFFERS and memoryview(value).nbytes <= _MOST_BYTES


def _is_plain_table(table: Any) -> bool:
    """Tell whether a table, and those within it, hold what packages register, no results that they keep."""
    kinds = *_NUMBERS, *_SETTINGS, *_FUNCTIONS, type, enum.Enum, frozenset
    left = _MOST_ITEMS
    pending = [(table, 1)]
    while pending:
        holder, depth = pending.pop()
        items = _items_of(holder)
        left -= len(items)
        if left < 0 or depth > _MOST_TABLES:
            return False
        if isinstance(holder, set):  # those of classes grow by imports
            if not all(isinstance(item, _NUMBERS) for item in items):
                return False
            continue
        for item in items:
            if issubclass(type(item), (*_TABLES, tuple, types.CellType)):
                pending.append((item, depth + 1))
            elif not (isinstance(item, kinds) or callable(item) or isinstance(holder, tuple)):
                return False
    return True


def _items_of(table: Any) -> list[Any]:
    """Return what a table holds, of a mapping its values, without running code of its class."""
    if isinstance(table, types.MappingProxyType):
        return list(table.values())
    if isinstance(table, types.CellType):
        return list(_contents_of(table))
    if isinstance(table, contextvars.ContextVar):
        try:
            return [table.get()]
        except LookupError:
            return []
    kind = next(k for k in (dict, list, set, tuple, collections.deque) if isinstance(table, k))
    return list(dict.values(table) if kind is dict else kind.__iter__(table))


def _contents_of(value: Any) -> tuple[Any, ...]:
    """Return what a cell holds, a value itself."""
    if not isinstance(value, types.CellType):
        return (value,)
    try:
        return (value.cell_contents,)
    except ValueError:
        return ()


def is_of_library(cls: type) -> bool:
    """Tell whether a class is written in Python and of an installed package, neither Python's own nor PyTorch's."""
    name = getattr(cls, "__module__", None)
    if not isinstance(name, str):
        return False
    if name.partition(".")[0] in _OTHERS:
        return False
    home = home_of({"__name__": name})
    file = file_of(home)
    return bool(file) and not is_own(home) and not is_standard(file)


def _class_of(code: types.CodeType, table: dict[str, Any]) -> type | None:
    """Return the class in whose body a function stands; None for none that its module has."""
    body = getattr(code, "co_qualname", "").rpartition(".")[0]
    found = attribute_of(home_of(table), body)
    return found if isinstance(found, type) else None


def _function_behind(value: Any) -> types.FunctionType | None:
    """Return the function that an entry of a class runs in the end: decorators share their code."""
    function = function_behind(value)
    while isinstance(wrapped := getattr(function, "__wrapped__", None), types.FunctionType):
        function = wrapped
    return function
