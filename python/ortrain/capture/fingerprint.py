# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A digest of everything visible that a captured graph depends on, or the reason there is none.

Values are described by content, installed functions by name and code, functions of the user's own
code by code, closure and the globals that they read. What cannot be described raises Unkeyable.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ortrain.capture.class_facts import function_behind
from ortrain.capture.names_in_code import codes_in, globals_of, modules_imported_by
from ortrain.capture.outside_reads import outside_read
from ortrain.capture.source_files import TORCH_ROOT, file_of, is_installed, real_path
from ortrain.capture.value_digest import (
    BUILTIN,
    Unkeyable,
    ValueDigest,
    attribute_of,
    gaps_of,
)

# What nn.Module itself keeps in an instance: structure and flags, which are described one by one.
_MODULE_STATE = frozenset(nn.Module().__dict__)
# Methods that run when an object is made, copied, shown or looked up, not in a forward.
_NOT_IN_FORWARD = frozenset(
    {"__init__", "__new__", "__init_subclass__", "__repr__", "__str__", "__del__", "__reduce__"}
    | {"__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__copy__", "extra_repr"}
    | {"__hash__"}
)
_NEVER_ASKED = frozenset({"__init__", "__new__", "__del__", "__hash__"})
# Their functions tell what stays the same as long as the process runs, so that no guard compares it.
_OF_THE_PROCESS = frozenset({"platform", "psutil", "torch.distributed"})
_BUILTINS_OF_THE_PROCESS = frozenset({"hash", "id"})
_TORCH_OF_THE_PROCESS = frozenset(
    {
        "get_rank",
        "get_world_size",
        "get_num_threads",
        "get_num_interop_threads",
        "initial_seed",
        "is_available",
        "device_count",
    }
    | {"get_device_name", "get_device_capability", "get_device_properties", "mem_get_info"}
)
_PLAIN = (type(None), bool, int, float, str)
# Identifiers of a session, which say nothing about a graph.
_RANDOM = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Fingerprint(ValueDigest):
    """Digest of a module and of further values, one after the other, with the code behind them.

    Args:
      module: The module whose layers and tensors may be referred to by name.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._module = module
        self._tensors: dict[int, str] = {}
        self._own_modules: dict[str, types.ModuleType] = {}
        self._names: set[str] = set()  # attributes that walked functions mention
        self._classes: dict[type, None] = {}  # the user's own, whose methods are walked on demand
        self._modules: dict[str, None] = {}  # installed modules whose globals are described

    def digest(self) -> str:
        """Follow what is still pending and return the digest in hexadecimal."""
        self._walk_pending()
        return super().digest()

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
        self.token(tensor.device, tensor.layout, tensor.requires_grad, gaps_of(tensor))

    # --- code

    def _tensor(self, value: torch.Tensor, where: str) -> None:
        if id(value) in self._tensors:
            self.token("tensor", self._tensors[id(value)])
        else:
            super()._tensor(value, where)

    def _class(self, cls: type) -> None:
        """Add a class by name, and where its methods stand; the user's own are walked later."""
        if id(cls) in self._seen:
            self._again(cls)
            return
        super()._class(cls)
        home = sys.modules.get(cls.__module__)
        if home is None and any(isinstance(v, types.FunctionType) for v in vars(cls).values()):
            raise Unkeyable(f"class {cls.__module__}.{cls.__qualname__} is of no module")
        if cls.__module__ == "builtins" or home is None:
            return
        file = _file_of(home)
        resolved = attribute_of(home, cls.__qualname__) is cls
        if file is not None and is_installed(file):
            if not resolved and not cls.__flags__ & (1 << 8):
                raise Unkeyable(f"class {cls.__module__}.{cls.__qualname__} is made at run time")
            self._installed_class(cls, file)
            return
        if file is None:
            raise Unkeyable(f"class {cls.__module__}.{cls.__qualname__} has no source file")
        self._classes[cls] = None

    def _installed_class(self, cls: type, file: str) -> None:
        for name, value in cls.__dict__.items():
            if name in _NOT_IN_FORWARD:  # dynamo replaces some of these
                continue
            function = function_behind(value)
            if function is not None:
                self.token(name)
                self._installed_function(function, f"method '{cls.__qualname__}.{name}'")
            elif type(value) in _PLAIN and not name.startswith("__"):
                self.token(name, value)
        if not file.startswith(TORCH_ROOT):
            self._modules[cls.__module__] = None

    def _installed_function(self, function: types.FunctionType, where: str) -> None:
        """Add a function of installed code: sources are checked as files, so its name will do."""
        file = real_path(function.__code__.co_filename)
        if file.startswith("<") or is_installed(file):
            self.token(function.__module__, function.__qualname__)
            if not file.startswith(TORCH_ROOT):
                self._code(function.__code__)
                self._modules.setdefault(function.__module__ or "", None)
        elif not self._again(function):
            self._function(function, where)

    def _function(self, function: types.FunctionType, where: str) -> None:
        super()._function(function, where)
        file = real_path(function.__code__.co_filename)
        if not is_installed(file):
            self._reads(function)
        elif not file.startswith(TORCH_ROOT):
            self._modules.setdefault(function.__module__ or "", None)

    def _reads(self, function: types.FunctionType) -> None:
        """Add the globals that a function of the user's reads, and note what it mentions."""
        names = sorted({n for code in codes_in(function.__code__) for n in code.co_names})
        self._names.update(names)
        _refuse_facts_of_the_process(function)
        for name in names:
            if name in function.__globals__:
                self.token(name)
                value = function.__globals__[name]
                self.add(value, f"global '{name}' of {function.__module__}")
                if isinstance(value, types.ModuleType):
                    self._settings(value, names)
            elif name in sys.modules:  # imported in the function
                self._python_module(sys.modules[name])
                self._settings(sys.modules[name], names)

    def _settings(self, module: types.ModuleType, names: list[str]) -> None:
        """Add what an installed module holds, by names that a function mentions."""
        if not is_installed(file_of(module) or "<frozen"):
            return  # whose names are followed in the end
        for name in names:
            value = vars(module).get(name, module)
            if not isinstance(value, (types.ModuleType, types.FunctionType, type, *BUILTIN)):
                self.token(name)
                self.add(value, f"'{name}' of {module.__name__}")

    def _python_module(self, module: types.ModuleType) -> None:
        super()._python_module(module)
        file = file_of(module)
        if file is not None and not is_installed(file):
            self._own_modules[module.__name__] = module

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
        special = name.startswith("__") and name not in _NEVER_ASKED
        return special and isinstance(value, (types.FunctionType, classmethod, staticmethod))

    def _installed_globals(self, name: str) -> None:
        """Add what the names of an installed module stand for: they may have been replaced."""
        module = sys.modules.get(name)
        file = None if module is None else _file_of(module)
        if module is None or file is None or not is_installed(file):
            return
        self.token("globals", name)
        for key, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType):
                self.token(key, value.__module__, value.__qualname__)
                if not is_installed(value.__code__.co_filename):
                    raise Unkeyable(f"{name}.{key} was replaced by a function of other code")
            elif isinstance(value, (type, *BUILTIN)):
                self.token(key, getattr(value, "__module__", None), value.__qualname__)
            elif type(value) in _PLAIN and not (key.startswith("__") or _is_random(value)):
                self.token(key, value)


def _file_of(module: types.ModuleType) -> str | None:
    """Return a module's file. Which modules have none, being parts of the interpreter, depends on its build."""
    file = file_of(module)
    if file is None and module.__name__ in sys.builtin_module_names:
        return f"<frozen {module.__name__}>"
    return file


def _refuse_facts_of_the_process(function: types.FunctionType) -> None:
    """Raise Unkeyable where a function may ask for what another process would be told otherwise."""
    for code in codes_in(function.__code__):
        if what := outside_read(code, function.__globals__):
            raise Unkeyable(f"'{function.__qualname__}' reads {what}")
        values = {name: function.__globals__.get(name) for name in globals_of(code)}
        imported = modules_imported_by(code, function.__globals__)
        values |= {module.__name__: module for module in imported}
        for name, value in values.items():
            if value is None:
                asked = name in _BUILTINS_OF_THE_PROCESS
            elif isinstance(value, types.ModuleType):
                asked = _asks_of_the_process(value, code.co_names)
            else:
                home = getattr(value, "__module__", None)
                asked = callable(value) and isinstance(home, str) and _is_of_the_process(home)
            if asked:
                raise Unkeyable(f"'{function.__qualname__}' may ask {name} of the process")


def _asks_of_the_process(module: types.ModuleType, names: tuple[str, ...]) -> bool:
    if _is_of_the_process(module.__name__):
        return any(callable(vars(module).get(name)) for name in names)
    is_torch = module.__name__.partition(".")[0] == "torch"
    return is_torch and not _TORCH_OF_THE_PROCESS.isdisjoint(names)


def _is_of_the_process(module: str) -> bool:
    parts = module.split(".")
    return parts[0] in _OF_THE_PROCESS or ".".join(parts[:2]) in _OF_THE_PROCESS


def _is_random(value: object) -> bool:
    return isinstance(value, str) and _RANDOM.fullmatch(value) is not None
