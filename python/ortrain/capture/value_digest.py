# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A digest of values of any kind, equal in another process where the values mean the same to a graph.

What an object holds is what guards compare of it (`_core.object_contents`). Classes and builtins are
described by name, functions by code. What shows nothing of its state raises Unkeyable.
"""

from __future__ import annotations

import array
import collections
import contextvars
import datetime
import functools
import hashlib
import logging
import operator
import pathlib
import re
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ortrain import _core
from ortrain.capture.class_facts import is_made_by_a_statement
from ortrain.capture.names_in_code import codes_in
from ortrain.capture.source_files import TORCH_ROOT, real_path

_MAX_VALUES = 200_000
_MAX_BYTES = 1 << 20  # of a tensor or an array

# Attributes that hold the hash of other attributes, which differs from process to process.
HASHES = frozenset({"_hash", "_original_object_hash"})
_PLAIN = (bool, int, float, complex, str, bytes)
_BY_TEXT = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(range, slice, pathlib.PurePath, type(...), type(NotImplemented)),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
_BY_REDUCTION = (
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    type(collections.namedtuple("_", "field").field),
)
BUILTIN = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType),
    types.ClassMethodDescriptorType,
)
_WRITTEN_IN_C = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType),
    types.ClassMethodDescriptorType,
)
_VIEWS = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
_BUFFERS = (bytearray, memoryview, array.array)
# Classes written in C whose whole state is items, values and what `_core.object_contents` tells.
_TOLD = frozenset(
    {dict, collections.OrderedDict, collections.defaultdict, list, tuple, collections.deque}
    | {set, frozenset, functools.partial, types.MethodType, types.SimpleNamespace}
    | {contextvars.ContextVar, weakref.ref, *_PLAIN, *_VIEWS}
    | {types.FunctionType, types.BuiltinMethodType, type(functools.cache(len))}
)


class Unkeyable(Exception):
    """Something that a graph may depend on has no description."""


def gaps_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor whose elements do not lie in row-major order without gaps, else None."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    return tensor.stride()


class ValueDigest:
    """Digest of values, one after the other.

    Args:
      module: The module whose layers may be referred to by name.
    """

    def __init__(self, module: nn.Module) -> None:
        self._hash = hashlib.sha256()
        self._layers = {id(part): path for path, part in module.named_modules()}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps the ids in _seen from being used again
        self._count = 0

    def digest(self) -> str:
        """Return the digest in hexadecimal."""
        return self._hash.hexdigest()

    def token(self, *parts: object) -> None:
        """Add plain values whose text says it all."""
        self._count += 1
        if self._count > _MAX_VALUES:
            raise Unkeyable("the module refers to too many objects")
        texts = [str(part).encode("utf-8", "surrogatepass") for part in parts]
        self._hash.update(b"".join([b"%d:%b" % (len(text), text) for text in texts]))

    def add(self, value: Any, where: str) -> None:
        """Add a value of any kind; ``where`` names it in the error.

        Raises:
          Unkeyable: It, or something that it holds, has no description.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str, bytes):
            self.token(kind.__name__, value)
        elif kind in (float, complex):
            self.token(kind.__name__, _text_of(value))
        elif isinstance(value, nn.Module):
            if id(value) not in self._layers:
                raise Unkeyable(f"{where} is a module that is no layer of the captured one")
            self.token("layer", self._layers[id(value)])
        elif isinstance(value, torch.Tensor):
            self._tensor(value, where)
        elif isinstance(value, _BY_TEXT) or kind.__module__ == "typing":
            self.token(kind.__qualname__, value)
        elif isinstance(value, (re.Pattern, logging.Logger)):
            self.token(kind.__qualname__, getattr(value, "pattern", getattr(value, "name", "")))
        elif isinstance(value, type):
            self._class(value)
        elif not self._again(value):
            self._structure(value, where)

    def _again(self, value: Any) -> bool:
        held = self._seen.get(id(value))
        if held is None:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            return False
        self.token("again", held)
        return True

    def _tensor(self, value: torch.Tensor, where: str) -> None:
        if (
            type(value) not in (torch.Tensor, nn.Parameter)
            or value.layout is not torch.strided
            or value.device.type != "cpu"
            or value.numel() * value.element_size() > _MAX_BYTES
        ):
            raise Unkeyable(f"{where} is a tensor that is no parameter or buffer")
        if self._again(value):
            return
        self.token("values", value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
        data = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        self._hash.update(data.view(torch.uint8).numpy().tobytes())

    def _structure(self, value: Any, where: str) -> None:
        kind = type(value)
        if isinstance(value, types.FunctionType):
            self._function(value, where)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, BUILTIN):
            self._builtin(value, where)
        elif isinstance(value, types.ModuleType):
            self._python_module(value)
        elif isinstance(value, (staticmethod, classmethod)):
            self.token(kind.__name__)
            self.add(value.__func__, where)
        elif isinstance(value, property):
            self.token("property")
            self._sequence((value.fget, value.fset), where)
        elif isinstance(value, functools.cached_property):
            self.token("property")
            self.add(value.func, where)
        elif hasattr(value, "__wrapped__") and kind is type(functools.cache(len)):
            self.token("cache")
            self.add(value.__wrapped__, where)
        elif kind in _BY_REDUCTION:
            self.token(kind.__qualname__)
            self._sequence(value.__reduce__()[1:], where)
        elif is_array(value):
            self._array(value, where)
        elif _is_function_of_numpy(value):
            self.token(kind.__qualname__, value.__name__)
        else:
            self._object(value, where)

    def _object(self, value: Any, where: str) -> None:
        """Add an object by its value and items, and by what the guards compare of it."""
        kind = type(value)
        self.expect_told(value, where)
        parts = _core.object_contents(value)
        is_container = isinstance(value, (dict, list, tuple, set, frozenset, collections.deque))
        if not (parts or is_container):
            raise Unkeyable(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        self._class(kind)
        self.add_plain(value)
        if isinstance(value, dict):
            self._mapping(value, where)
        elif isinstance(value, (list, tuple)):
            items = list if isinstance(value, list) else tuple
            self._sequence(items.__iter__(value), where)
        elif isinstance(value, collections.deque):
            self._sequence(value, where)
        elif isinstance(value, (set, frozenset)):
            self._set(value, where)
        if kind not in (dict, list, tuple):
            self._contents(value, parts, where)

    def expect_told(self, value: Any, where: str) -> None:
        """Raise Unkeyable for an object of a class written in C, which may hold what nobody is told."""
        kind = type(value)
        if not all(map(_is_told, kind.__mro__[:-1])):
            raise Unkeyable(f"{where} is a {kind.__module__}.{kind.__qualname__}")

    def add_plain(self, value: Any) -> None:
        """Add what an object is as a number or a text, whatever its class says."""
        for plain in _PLAIN:
            if isinstance(value, plain):
                self.token(plain.__name__, plain.__repr__(value))

    def _contents(self, value: Any, parts: list[Any], where: str) -> None:
        attributes = getattr(value, "__dict__", None)
        self.token("contents", len(parts))
        for part in parts:
            if part is attributes and type(part) is dict:
                self._attributes(part, where)
            else:
                self.add(part, where)

    def _attributes(self, attributes: dict[str, Any], where: str) -> None:
        self.token(len(attributes))
        for name, item in attributes.items():
            if name not in HASHES:
                self.token(name)
                self.add(item, f"{where}.{name}")

    def _sequence(self, values: Iterable[Any], where: str) -> None:
        items = list(values)
        self.token("sequence", len(items))
        for item in items:
            self.add(item, where)

    def _mapping(self, value: dict[Any, Any], where: str) -> None:
        self.token("mapping", dict.__len__(value))
        for key, item in dict.items(value):
            self.add(key, where)
            self.add(item, f"{where}[{key!r}]" if type(key) in (str, int) else where)

    def _set(self, value: Iterable[Any], where: str) -> None:
        items = list(value)
        if not all(v is None or type(v) in _PLAIN or isinstance(v, _BY_TEXT) for v in items):
            raise Unkeyable(f"{where} is a set of objects")
        self.token("set", *sorted(f"{type(v).__name__} {v!r}" for v in items))

    def _array(self, value: Any, where: str) -> None:
        """Add an array, or another object that lies in memory as one."""
        data = memoryview(value)
        if data.nbytes > _MAX_BYTES or data.format is None or "O" in data.format:
            raise Unkeyable(f"{where} is an array of objects, or a large one")
        self._class(type(value))
        dtype = getattr(getattr(value, "dtype", None), "str", "")
        self.token("array", data.format, dtype, data.shape, data.strides, data.readonly)
        self._hash.update(data.tobytes())
        for part in _core.object_contents(value):
            self.add(part, where)

    # --- code

    def _builtin(self, value: Any, where: str) -> None:
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            self.add(owner, where)
        self.token("builtin", getattr(value, "__module__", None), value.__qualname__)

    def _class(self, cls: type) -> None:
        """Add a class by name."""
        if self._again(cls):
            return
        self.token("class", cls.__module__, cls.__qualname__)
        for base in cls.__mro__[1:-1]:
            self._class(base)

    def _function(self, function: types.FunctionType, where: str) -> None:
        """Add a function by its code, defaults, attributes and what it closes over."""
        self.token("function", function.__module__, function.__qualname__)
        file = real_path(function.__code__.co_filename)
        if file.startswith(TORCH_ROOT) and has_its_name(function):
            return
        where = f"a value that '{function.__qualname__}' closes over"
        self._contents(function, _core.object_contents(function), where)

    def _python_module(self, module: types.ModuleType) -> None:
        self.token("module", module.__name__)

    def _code(self, code: types.CodeType) -> None:
        for part in codes_in(code):
            self.token(part.co_name, part.co_flags, part.co_argcount, part.co_kwonlyargcount)
            self.token(part.co_posonlyargcount, getattr(part, "co_exceptiontable", b""))
            self.token(part.co_code.hex(), part.co_names, part.co_varnames, part.co_freevars)
            self.token(part.co_cellvars)
            for constant in part.co_consts:
                if isinstance(constant, frozenset):
                    self._set(constant, "a constant")
                elif not isinstance(constant, types.CodeType):
                    self.token(type(constant).__name__, repr(constant))


def attribute_of(module: types.ModuleType | None, qualified: str) -> Any:
    """Return what a qualified name stands for in a module; None for nothing."""
    value: Any = module
    for name in qualified.split("."):
        value = getattr(value, name, None)
    return value


def has_its_name(function: types.FunctionType) -> bool:
    """Tell whether a function is what its module says."""
    home = sys.modules.get(function.__module__ or "")
    return attribute_of(home, function.__qualname__) is function


def is_array(value: Any) -> bool:
    """Tell whether a value is an array, a number of NumPy, or another buffer."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return True
    return isinstance(value, _BUFFERS)


def _is_function_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ufunc, type(numpy.copyto)))


def _text_of(number: float | complex) -> str:
    if isinstance(number, float):
        return number.hex()
    return f"{number.real.hex()} {number.imag.hex()}"


@functools.cache
def _is_told(cls: type) -> bool:
    """Tell whether objects of a class hold nothing but what Python shows; code in C may keep more."""
    if cls in _TOLD:
        return True
    if not is_made_by_a_statement(cls):  # no class statement has made it
        return False
    if type(cls) is not type and not _is_told(type(cls)):
        return False
    return not any(
        isinstance(value, _WRITTEN_IN_C) and value.__objclass__ is cls
        for name, value in cls.__dict__.items()
        if name not in ("__dict__", "__weakref__")
    )
