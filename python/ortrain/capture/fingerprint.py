# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A digest of everything visible that a captured graph depends on, or the reason there is none.

Values are described by content, installed functions by name and code, functions of the user's own
code by code, closure and the globals that they read. What cannot be described raises Unkeyable.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import logging
import pathlib
import re
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ortrain.capture.source_files import TORCH_ROOT, is_installed

_MAX_VALUES = 200_000
_MAX_TENSOR_BYTES = 1 << 20

# What nn.Module itself keeps in an instance: structure and flags, which are described one by one.
_MODULE_STATE = frozenset(nn.Module().__dict__)
# Names by which a function would read what is neither in the module nor in the sources.
_OUTSIDE = frozenset(
    {"__import__", "argv", "environ", "eval", "exec", "getenv", "globals", "import_module"}
    | {"input", "monotonic", "open", "perf_counter", "random", "read_text", "time"}
)
# Methods that run when an object is made, copied or shown, not in a forward.
_NOT_IN_FORWARD = frozenset(
    {"__init__", "__new__", "__init_subclass__", "__repr__", "__str__", "__del__", "__reduce__"}
    | {"__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__copy__", "extra_repr"}
)
_PLAIN = (type(None), bool, int, float, str)
# Attributes that hold the hash of other attributes, which differs from process to process.
_HASHES = frozenset({"_hash", "_original_object_hash"})
# Identifiers of a session, which say nothing about a graph.
_RANDOM = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_BY_TEXT = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    range,
    slice,
    pathlib.PurePath,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodWrapperType,
)


class Unkeyable(Exception):
    """Something that a graph may depend on has no description."""


class Fingerprint:
    """Digest of a module and of further values, one after the other.

    Args:
      module: The module whose layers and tensors may be referred to by name.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hash = hashlib.sha256()
        self._layers = {id(part): path for path, part in module.named_modules()}
        self._tensors: dict[int, str] = {}
        self._seen: dict[int, int] = {}
        self._own_modules: dict[str, types.ModuleType] = {}
        self._alive: list[Any] = []  # keeps the ids in _seen from being used again
        self._names: set[str] = set()  # attributes that walked functions mention
        self._classes: dict[type, None] = {}  # the user's own, whose methods are walked on demand
        self._modules: dict[str, None] = {}  # installed modules whose globals are described
        self._count = 0

    def digest(self) -> str:
        """Follow what is still pending and return the digest in hexadecimal."""
        self._walk_pending()
        return self._hash.hexdigest()

    def token(self, *parts: object) -> None:
        """Add plain values whose text says it all."""
        self._count += 1
        if self._count > _MAX_VALUES:
            raise Unkeyable("the module refers to too many objects")
        for part in parts:
            data = str(part).encode("utf-8", "surrogatepass")
            self._hash.update(b"%d:" % len(data))
            self._hash.update(data)

    # --- the module

    def add_module(self) -> None:
        """Add the structure, the tensors' kinds, the attributes and the classes of all layers."""
        for path, part in self._module.named_modules(remove_duplicate=False):
            self.token("layer", path, self._layers[id(part)])
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    self._declare(f"{path}.{name}" if path else name, tensor)
            self.token(*sorted(part._non_persistent_buffers_set))
        for path, part in self._module.named_modules():
            self.token(path, part.training)
            self._names.add("forward")
            self._class(type(part))
            for name, value in part.__dict__.items():
                if name not in _MODULE_STATE:
                    self.token(name)
                    self.add(value, f"attribute '{path}.{name}'" if path else f"attribute '{name}'")
        self._modules["torch.nn.functional"] = None

    def _declare(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            self.token("tensor", name, None)
            return
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            raise Unkeyable(f"'{name}' is a tensor of class {type(tensor).__qualname__}")
        tied = self._tensors.setdefault(id(tensor), name)
        self.token("tensor", name, tied, type(tensor).__name__, tensor.dtype, tuple(tensor.shape))
        self.token(tensor.device, tensor.layout, tensor.requires_grad)

    # --- values

    def add(self, value: Any, where: str) -> None:
        """Add a value of any kind; ``where`` names it in the error."""
        kind = type(value)
        if value is None or kind in (bool, int, str, bytes, complex):
            self.token(kind.__name__, value)
        elif kind is float:
            self.token("float", value.hex())
        elif isinstance(value, nn.Module):
            if id(value) not in self._layers:
                raise Unkeyable(f"{where} is a module that is no layer of the captured one")
            self.token("layer", self._layers[id(value)])
        elif isinstance(value, torch.Tensor):
            self._tensor(value, where)
        elif isinstance(value, _BY_TEXT):
            self.token(kind.__qualname__, value)
        elif isinstance(value, (re.Pattern, logging.Logger)):
            self.token(kind.__qualname__, getattr(value, "pattern", getattr(value, "name", "")))
        elif isinstance(value, weakref.ref):
            self.add(value(), where)
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
        if id(value) in self._tensors:
            self.token("tensor", self._tensors[id(value)])
            return
        if (
            type(value) not in (torch.Tensor, nn.Parameter)
            or value.layout is not torch.strided
            or value.device.type != "cpu"
            or value.numel() * value.element_size() > _MAX_TENSOR_BYTES
        ):
            raise Unkeyable(f"{where} is a tensor that is no parameter or buffer")
        self.token("values", value.dtype, tuple(value.shape), value.requires_grad)
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        self._hash.update(data.numpy().tobytes())

    def _structure(self, value: Any, where: str) -> None:
        kind = type(value)
        if isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value, where)
        elif isinstance(value, types.MethodType):
            self.token("method")
            self.add(value.__self__, where)
            self.add(value.__func__, where)
        elif isinstance(value, _BUILTIN):
            self._builtin(value, where)
        elif isinstance(value, types.ModuleType):
            self._python_module(value)
        elif isinstance(value, functools.partial):
            self.token("partial")
            self._sequence((value.func, value.args, value.keywords), where)
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
        elif isinstance(value, enum.Enum):
            self._class(kind)
            self.token(value.name)
        elif isinstance(value, (dict, types.MappingProxyType)):
            self._mapping(value, where)
        elif isinstance(value, (list, tuple, collections.deque)):
            self._class(kind)
            self._sequence(value, where)
            self._attributes(value, where)
        elif kind in (set, frozenset):
            self._set(value, where)
        else:
            self._object(value, where)

    def _sequence(self, values: Iterable[Any], where: str) -> None:
        items = list(values)
        self.token("sequence", len(items))
        for item in items:
            self.add(item, where)

    def _mapping(self, value: Any, where: str) -> None:
        self._class(type(value))
        self.token("mapping", len(value))
        for key, item in dict.items(value) if isinstance(value, dict) else value.items():
            self.add(key, where)
            self.add(item, f"{where}[{key!r}]" if isinstance(key, (str, int)) else where)
        if isinstance(value, collections.defaultdict):
            self.add(value.default_factory, where)
        self._attributes(value, where)

    def _set(self, value: Iterable[Any], where: str) -> None:
        if not all(v is None or type(v) in (bool, int, float, str, bytes) for v in value):
            raise Unkeyable(f"{where} is a set of objects")
        self.token("set", *sorted(f"{type(v).__name__} {v!r}" for v in value))

    def _attributes(self, value: Any, where: str) -> None:
        attributes = getattr(value, "__dict__", {})
        self.token(len(attributes))
        for name, item in attributes.items():
            if name not in _HASHES:
                self.token(name)
                self.add(item, f"{where}.{name}")

    def _object(self, value: Any, where: str) -> None:
        """Add an instance of a class written in Python, whose state is its __dict__."""
        kind = type(value)
        for cls in kind.__mro__[:-1]:
            source = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
            if not source.endswith(".py") or cls.__dict__.get("__slots__"):
                raise Unkeyable(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        if not hasattr(value, "__dict__"):
            raise Unkeyable(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        self._class(kind)
        self._attributes(value, where)

    # --- code

    def _builtin(self, value: Any, where: str) -> None:
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            raise Unkeyable(f"{where} is a method of a {type(owner).__qualname__}")
        self.token("builtin", getattr(value, "__module__", None), value.__qualname__)

    def _class(self, cls: type) -> None:
        """Add a class by name, and where its methods stand; the user's own are walked later."""
        if self._again(cls):
            return
        self.token("class", cls.__module__, cls.__qualname__)
        for base in cls.__mro__[:-1]:
            if base is not cls:
                self._class(base)
        home = sys.modules.get(cls.__module__)
        if cls.__module__ == "builtins" or home is None:
            return
        file = getattr(home, "__file__", None)
        resolved = _attribute(home, cls.__qualname__) is cls
        if file is not None and is_installed(file):
            if not resolved and not cls.__flags__ & (1 << 8):
                raise Unkeyable(f"class {cls.__module__}.{cls.__qualname__} is made at run time")
            self._installed_class(cls, file)
            return
        if file is None:
            raise Unkeyable(f"class {cls.__module__}.{cls.__qualname__} has no source file")
        if not resolved and "<locals>" not in cls.__qualname__:
            raise Unkeyable(f"class {cls.__module__}.{cls.__qualname__} is made at run time")
        self._classes[cls] = None

    def _installed_class(self, cls: type, file: str) -> None:
        for name, value in cls.__dict__.items():
            if name in _NOT_IN_FORWARD:  # dynamo replaces some of these
                continue
            function = _underlying(value)
            if function is not None:
                self.token(name)
                self._installed_function(function, f"method '{cls.__qualname__}.{name}'")
            elif type(value) in _PLAIN and not name.startswith("__"):
                self.token(name, value)
        if not file.startswith(TORCH_ROOT):
            self._modules[cls.__module__] = None

    def _installed_function(self, function: types.FunctionType, where: str) -> None:
        """Add a function of installed code: sources are checked as files, so its name will do."""
        file = function.__code__.co_filename
        if file.startswith("<") or is_installed(file):
            self.token(function.__module__, function.__qualname__)
            if not file.startswith(TORCH_ROOT):
                self._code(function.__code__)
                self._modules.setdefault(function.__module__ or "", None)
        elif not self._again(function):
            self._function(function, where)

    def _function(self, function: types.FunctionType, where: str) -> None:
        code = function.__code__
        self.token("function", function.__module__, function.__qualname__)
        file = code.co_filename
        own = not is_installed(file)
        if own and (file.startswith("<") or not pathlib.Path(file).is_file()):
            raise Unkeyable(f"function '{function.__qualname__}' has no source file")
        self._code(code)
        self._sequence((function.__defaults__, function.__kwdefaults__), where)
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:
                self.token("empty cell")
                continue
            self.add(held, f"a value that '{function.__qualname__}' closes over")
        state = {k: v for k, v in function.__dict__.items() if k != "__wrapped__"}
        if own:
            self.add(state, where)
            self._reads(function)
        elif not file.startswith(TORCH_ROOT):
            self._modules.setdefault(function.__module__ or "", None)

    def _reads(self, function: types.FunctionType) -> None:
        """Add the globals that a function of the user's reads, and note what it mentions."""
        names = sorted({n for code in _codes(function.__code__) for n in code.co_names})
        self._names.update(names)
        outside = _OUTSIDE.intersection(names)
        if outside:
            raise Unkeyable(f"'{function.__qualname__}' reads {', '.join(sorted(outside))}")
        for name in names:
            if name in function.__globals__:
                self.token(name)
                where = f"global '{name}' of {function.__module__}"
                self.add(function.__globals__[name], where)
            elif name in sys.modules:  # imported in the function
                self._python_module(sys.modules[name])

    def _python_module(self, module: types.ModuleType) -> None:
        self.token("module", module.__name__)
        file = getattr(module, "__file__", None)
        if file is not None and not is_installed(file):
            self._own_modules[module.__name__] = module

    def _code(self, code: types.CodeType) -> None:
        for part in _codes(code):
            self.token(part.co_name, part.co_flags, part.co_argcount, part.co_kwonlyargcount)
            self.token(part.co_code.hex(), part.co_names, part.co_varnames, part.co_freevars)
            for constant in part.co_consts:
                if isinstance(constant, frozenset):
                    self._set(constant, "a constant")
                elif not isinstance(constant, types.CodeType):
                    self.token(type(constant).__name__, repr(constant))

    # --- what is followed in the end

    def _walk_pending(self) -> None:
        """Walk methods and globals of the user's code until nothing more is mentioned."""
        walked: set[tuple[str, str]] = set()
        changed = True
        while changed:
            changed = False
            for owner, table in list(self._tables()):
                for name, value in list(table.items()):
                    if (owner, name) in walked or not self._matters(name, value):
                        continue
                    walked.add((owner, name))
                    changed = True
                    self.token(owner, name)
                    self.add(value, f"'{name}' of {owner}")
        for name in sorted(self._modules):
            self._installed_globals(name)

    def _tables(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for i, cls in enumerate(list(self._classes)):
            yield f"class {i} {cls.__module__}.{cls.__qualname__}", dict(cls.__dict__)
        for name, module in list(self._own_modules.items()):
            yield (
                f"module {name}",
                {k: v for k, v in vars(module).items() if not k.startswith("__")},
            )

    def _matters(self, name: str, value: Any) -> bool:
        if name in self._names:
            return True
        special = name.startswith("__") and name not in _NOT_IN_FORWARD
        return special and isinstance(value, (types.FunctionType, classmethod, staticmethod))

    def _installed_globals(self, name: str) -> None:
        """Add what the names of an installed module stand for: they may have been replaced."""
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None or not is_installed(file):
            return
        self.token("globals", name)
        for key, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType):
                self.token(key, value.__module__, value.__qualname__)
                if not is_installed(value.__code__.co_filename):
                    raise Unkeyable(f"{name}.{key} was replaced by a function of other code")
            elif isinstance(value, (type, *_BUILTIN)):
                self.token(key, getattr(value, "__module__", None), value.__qualname__)
            elif type(value) in _PLAIN and not (key.startswith("__") or _is_random(value)):
                self.token(key, value)


def _is_random(value: object) -> bool:
    return isinstance(value, str) and _RANDOM.fullmatch(value) is not None


def _attribute(module: types.ModuleType, qualified: str) -> Any:
    value: Any = module
    for name in qualified.split("."):
        value = getattr(value, name, None)
    return value


def _underlying(value: Any) -> types.FunctionType | None:
    """Return the function behind an entry of a class, if it is one."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    return value if isinstance(value, types.FunctionType) else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
