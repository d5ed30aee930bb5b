# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Everything but the values of tensors that a forward can reach and change, before and after a trace.

Looked at are the attributes and tables of layers, what containers and objects hold that these lead to, the
arguments, the generators of Python and NumPy, and what functions of the user's own share: class attributes,
closures, globals that they name.
"""

from __future__ import annotations

import abc
import array
import builtins
import collections
import contextvars
import ctypes
import functools
import logging
import random
import re
import sys
import types
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ortrain.capture.absent_names import absent_in, asked_by, asked_in_vain, names_of_classes
from ortrain.capture.cached_functions import CachedFunctions, LruCache
from ortrain.capture.class_facts import (
    OF_CLASSES,
    OF_FUNCTIONS,
    RegisteredClasses,
    is_made_by_a_statement,
    reads_by_names,
)
from ortrain.capture.names_in_code import codes_in, globals_of, modules_imported_by
from ortrain.capture.opaque_objects import LOCK, is_opaque
from ortrain.capture.process_facts import fact_of
from ortrain.capture.replaced_functions import functions_named
from ortrain.capture.shallow_copies import (
    Attributes,
    CellVariable,
    Changes,
    Contents,
    ContextValue,
    Copy,
    Items,
    Table,
    Told,
)
from ortrain.capture.source_files import file_of, is_installed
from ortrain.capture.torch_internals import acts_by_itself, is_fake

_LEAVES = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.Tensor, torch.dtype, torch.device, torch.Generator),
    *(types.BuiltinFunctionType, types.CodeType, logging.Logger, property),
)
# Of objects that these packages make only layers are looked into.
_CLOSED = ("torch.", "ortrain.", "threading", "concurrent.", "asyncio.")
_OPEN = ("torch.distributions.",)
# Tables of a layer, whose names are those of the layer's attributes.
_LAYER_TABLES = ("_parameters", "_buffers", "_modules")
# Recurrent layers list their parameters anew where these are others, as they are in a trace.
_LISTS_OF_PARAMETERS = ("_flat_weights", "_flat_weight_refs")
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_BYTES = (
    bytearray,
    memoryview,
    array.array,
    ctypes.Array,
    ctypes.Structure,
    ctypes.Union,
    ctypes._SimpleCData,
)
_PLAIN_CONTAINERS = (dict, collections.OrderedDict, list, set, collections.deque)
_slots_of: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()
_ITERATORS = ("builtins", "itertools")
_MAKING = ("__init__", "__new__", "__post_init__")
# Special methods that no step of a forward calls by itself; all others may run at an operator or a statement.
_OUTSIDE_OF_CALLS = frozenset(
    {*_MAKING, "__del__", "__setstate__", "__annotate__", "__annotate_func__"}
)
# What Python and its libraries put into classes.
_OF_EVERY_CLASS = frozenset(
    {
        *dir(type),
        *dir(object),
        *(
            "__abstractmethods__",
            "__annotations__",
            "__annotations_cache__",
            "__conditional_annotations__",
        ),
        *("__classdict__", "__dataclass_fields__", "__dataclass_params__", "__final__"),
        *("__firstlineno__", "__hash__", "__match_args__", "__orig_bases__", "__parameters__"),
        *("__slots__", "__static_attributes__", "__torch_function__", "__type_params__"),
        *("__weakref__", "__constants__", "__jit_unused_properties__", "__protocol_attrs__"),
        *("__non_callable_proto_members__", "__callable_proto_members_only__"),
    }
)
_ARGUMENTS = "its arguments"
_SLOTS_OF_ORTMODULE = "_ortrain_"


class ReachableState:
    """What is there before a forward.

    Args:
      module: The module that runs, or another object with methods.
      arguments: What it is called with.
      keeps_contents: Whether tensors with contents are set back too.
      functions: Whether classes of autograd functions count, which otherwise run for real with each call.
      tensors: Whether to note where tensors lie, which code that is being traced may not ask.

    Attributes:
      classes: Of objects that were found, and their bases.
      variables: Of the user's own code, those that functions share: a dictionary of globals, a cell or a class, and
        the name of the item, of the cell's content or of the attribute.
      closing: Names of classes, not of layers, whose methods use variables of a function around them.
      consumed: Iterators and generators, which a trace could use up and not set back.
      caches: Functions that keep what they have returned.
      acting_tensors: Those of a class that decides what operators do.
      opaque: Objects that the user's own functions name, of a state that nobody can compare.
      functions: Those of the user's own code.
    """

    def __init__(
        self,
        module: Any,
        arguments: Any,
        *,
        keeps_contents: bool = True,
        functions: bool = False,
        tensors: bool = True,
    ) -> None:
        self._keeps_contents = keeps_contents
        self._of = module, arguments
        self._takes_functions, self._notes_tensors = functions, tensors
        self._seen: dict[int, Any] = {}  # by address; keeps them alive
        self._copies: list[Copy] = []
        self.classes: dict[type, None] = {}  # in the order in which they were found
        self.variables: list[tuple[Any, str]] = []
        self._inherited: list[tuple[type, str]] = []  # what own classes may come to hide
        self.closing: list[str] = []
        self.consumed: list[str] = []
        self.caches = CachedFunctions()
        self.acting_tensors: list[str] = []
        self._opaque: dict[str, str] = {}  # by place: the class
        self._readers: list[str] = []  # places of what reads attributes by names
        self._first_place: dict[int, str] = {}
        self._other_places: list[
            tuple[str, str]
        ] = []  # of what was found before, the first one and another
        self.functions: list[types.FunctionType] = []
        self._arrays: set[int] = set()  # addresses
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        self._names: set[str] = set()  # that the user's functions mention
        self._local: set[str] = set()  # those of what they close over, and of their defaults
        self._own_modules: dict[str, types.ModuleType] = {}
        self._others_modules: list[types.ModuleType] = []
        self._pending: list[tuple[str, Any]] = [(_ARGUMENTS, arguments), ("", module)]
        self._global_generators()
        self._walk()
        known: dict[str, set[str]] = {}  # of modules the names that were looked up
        while self._named_in_modules(known):
            self._walk()
        for home in self._others_modules:
            for value in named_in(home, self._names):
                self._abstract(value[2])

    def _named_in_modules(self, known: dict[str, set[str]]) -> bool:
        """Take the variables of the user's own modules that code names; tell whether some are new."""
        pending = False
        for name, home in list(self._own_modules.items()):
            names = self._names - known.setdefault(name, set())
            known[name] |= names
            pending |= not names.isdisjoint(vars(home))
            if names:
                self._globals(name, vars(home), names)
        return pending

    def tensor_at(self, alias: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that was found with the memory, shape and dtype of another; None where none was."""
        place = _place(alias)
        if place is None:
            return alias if alias.numel() == 0 else None
        return self._tensors.get(place)

    def has_array_at(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in the memory of an array that was found."""
        return tensor.data_ptr() in self._arrays

    def holds(self, value: Any) -> bool:
        """Tell whether an object, no plain value, was there."""
        return self._seen.get(id(value)) is value

    def again(self) -> ReachableState:
        """Return what is there now."""
        return ReachableState(*self._of, functions=self._takes_functions, tensors=False)

    @property
    def names(self) -> frozenset[str]:
        """What the user's own functions name."""
        return frozenset(self._names)

    @property
    def reads_any_attribute(self) -> bool:
        """Whether the user's functions name something that may read any attribute of anything."""
        return any(map(self._is_named, self._readers))

    @property
    def opaque(self) -> list[str]:
        found = [
            f"{where}, a {cls}" for where, cls in self._opaque.items() if self._is_named(where)
        ]
        if "cache_info" in self._names and self.caches.names():
            found.append("how often caches were asked")
        return found

    def _is_named(self, place: str) -> bool:
        """Tell whether the user's own functions name what is on the way to a place, or on another way there."""
        named, pending, seen = self._names | self._local, [place], set()
        while pending:
            way = pending.pop()
            if way.startswith(_ARGUMENTS) or not named.isdisjoint(re.findall(r"\w+", way)):
                return True
            for first, other in self._other_places:
                if way.startswith(first) and other not in seen:
                    seen.add(other)
                    pending.append(other)
        return False

    def autograd_functions(self) -> list[types.FunctionType]:
        """Return the methods of autograd functions, which run for real with each call."""
        return [
            function
            for cls in self.classes
            if issubclass(cls, torch.autograd.Function)
            for value in vars(cls).values()
            for function in _functions_of(value)
        ]

    def variables_named(self, names: frozenset[str] | None) -> list[tuple[Any, ...]]:
        """Return the variables that code with these names may read; cells belong to functions, and count."""
        own: list[tuple[Any, ...]] = [
            (owner, name)
            for owner, name in self.variables
            if names is None
            or name in names
            or name == "__mro__"  # by which attributes are looked up
            or name in _MAKING  # which nobody names to make an object
            or isinstance(owner, types.CellType)
        ]
        own += [
            (cls, name, "own")
            for cls, name in self._inherited
            if names is None or name in names or name.startswith("__")
        ]
        own += names_of_classes(self.classes)
        own += self._absent_in_modules()
        # Somebody may put functions of his own in the place of PyTorch's.
        read = self._names if names is None else names
        return own + functions_named(read)

    def unfollowed(self) -> Iterator[tuple[Any, ...]]:
        """Return variables of which Dynamo knows nothing: what functions may ask for where it is not, and of metaclasses."""
        yield from names_of_classes(self.classes)
        yield from self._absent_in_modules()
        for owner, name in self.variables:
            if isinstance(owner, type) and issubclass(owner, type):  # by which classes find it
                yield owner, name
        for function in self.functions:
            for code in codes_in(function.__code__):
                yield from asked_in_vain(code, function.__globals__)

    def _absent_in_modules(self) -> Iterator[tuple[Any, str, str]]:
        asked = {n for f in self.functions for part in codes_in(f.__code__) for n in asked_by(part)}
        for home in self._own_modules.values() if asked else ():
            yield from absent_in(vars(home), asked)

    def held(self) -> Iterator[Any]:
        """Return what tables and containers held."""
        return (value for copy in self._copies for _, value in copy.held())

    def places(self) -> Iterator[tuple[Any, Any, Any]]:
        """Return where tables and containers held what they did: something with items, the key, the object."""
        return (place for copy in self._copies for place in copy.places())

    def differing(self) -> Iterator[tuple[str, Any, Any]]:
        """Return the name, what was there and what is now, of all that is another object or value."""
        return (difference for copy in self._copies for difference in copy.differing())

    def restore(self) -> Changes:
        """Set back what differs now, and return its names."""
        changes = Changes()
        for copy in self._copies:
            copy.restore(changes)
        return changes

    def _take(self, copy: Copy) -> None:
        self._copies.append(copy)
        self._pending.extend(copy.held())

    def _walk(self) -> None:
        while self._pending:
            where, value = self._pending.pop()
            if self._notes_tensors and isinstance(value, torch.Tensor):
                if acts_by_itself(value):
                    self.acting_tensors.append(where)
                place = _place(value)
                if place is not None and place not in self._tensors:
                    self._tensors[place] = value
                    if self._keeps_contents and not value.is_inference():
                        self._copies.append(Contents(where, value))
            looks = not isinstance(value, _LEAVES) or isinstance(value, types.BuiltinFunctionType)
            if not looks:
                # A number or a text of a class of the user's own; of tensors' classes others tell.
                if type(value) not in _LEAVES and not isinstance(value, torch.Tensor):
                    self._class(type(value))
                continue
            first = self._first_place.setdefault(id(value), where)
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._look_at(where, value)
            elif first != where:
                self._other_places.append((first, where))

    def _look_at(self, where: str, value: Any) -> None:
        if reads_by_names(value):
            self._readers.append(where)
        if is_opaque(value) and not _is_known_iterator(value):
            self._opaque.setdefault(where, type(value).__qualname__)
        elif isinstance(value, type):
            self._class(value)
            self._abstract(value)
        elif isinstance(value, nn.Module):
            self._layer(where, value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._pending += [(where, value.__self__), (where, value.__func__)]
        elif isinstance(value, functools.partial):
            self._pending += [(where, value.func), (where, value.args), (where, value.keywords)]
        elif isinstance(value, types.ModuleType):
            if is_own(value):
                self._own_modules[value.__name__] = value
            else:
                self._others_modules.append(value)
        elif isinstance(value, dict):
            self._take(Table(where, value))
            self._object(where, value)
        elif isinstance(value, (list, collections.deque, set)):
            self._take(Items(where, value))
            self._object(where, value)
        elif isinstance(value, (tuple, frozenset)):
            self._pending += [(where, item) for item in value]
        elif isinstance(value, LruCache):
            self.caches.add(value)
            self._pending.append((where, value.__wrapped__))
        elif isinstance(value, weakref.ref):
            self._pending.append((where, value()))
        elif isinstance(value, contextvars.ContextVar):
            self._take(Table(where, ContextValue(value)))
        elif isinstance(value, (types.MappingProxyType, *_VIEWS)):
            shown = value.items() if isinstance(value, types.MappingProxyType) else value
            self._pending += [(where, item) for item in shown]
        elif not self._generator_or_array(where, value):
            self._object(where, value)

    def _layer(self, where: str, layer: nn.Module) -> None:
        self._class(type(layer))
        attributes = layer.__dict__
        if isinstance(layer, nn.RNNBase):
            attributes = {k: v for k, v in attributes.items() if k not in _LISTS_OF_PARAMETERS}
        table = Table(where, layer.__dict__, None if attributes is layer.__dict__ else attributes)
        self._copies.append(table)
        for (name, value), key in zip(table.held(), attributes, strict=True):
            self._pending.append((where if key in _LAYER_TABLES else name, value))
        for slot in _all_slots(type(layer)):  # no guard knows of it
            if slot.startswith(_SLOTS_OF_ORTMODULE):
                continue
            self._opaque.setdefault(f"{where}.{slot}", "value in a slot of a layer")

    def _object(self, where: str, value: Any) -> None:
        kind = type(value)
        if kind.__module__.startswith(_CLOSED) and not kind.__module__.startswith(_OPEN):
            return
        self._class(kind)
        slots = () if kind in _PLAIN_CONTAINERS else _all_slots(kind)
        if slots:
            self._take(Table(where, Attributes(value, lambda: slots)))
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._take(Table(where, attributes))

    def _abstract(self, value: Any) -> None:
        if isinstance(value, abc.ABCMeta):
            registered = RegisteredClasses.about(value)
            self.variables += [(registered, name) for name in ("isinstance", "issubclass")]

    # --- what is in no attribute

    def _global_generators(self) -> None:
        name = "Python's random numbers"
        self._take(Told(name, random.getstate, random.setstate, "drawn"))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            get, put = numpy.random.get_state, numpy.random.set_state
            self._take(Told("NumPy's random numbers", get, put, "drawn"))

    def _generator_or_array(self, where: str, value: Any) -> bool:
        """Take an object whose state is in no attribute; False for others."""
        numpy = sys.modules.get("numpy")
        if isinstance(value, random.Random):
            self._take(Told(where, value.getstate, value.setstate, "unfollowed"))
        elif isinstance(value, LOCK):
            self._take(Told(where, value.locked, functools.partial(_set_lock, value), "unfollowed"))
        elif isinstance(value, _BYTES):
            self._bytes(where, value)
        elif _is_known_iterator(value):
            self._iterator(where, value)
        elif numpy is None:
            return False
        elif isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            write = functools.partial(setattr, bits, "state")
            self._take(Told(where, lambda: bits.state, write, "unfollowed"))
        elif isinstance(value, numpy.random.RandomState):
            self._take(Told(where, value.get_state, value.set_state, "unfollowed"))
        elif isinstance(value, numpy.ndarray) and _holds_more_than_bytes(value, numpy):
            self._opaque.setdefault(where, f"{type(value).__qualname__} of {value.dtype}")
        elif isinstance(value, numpy.ndarray):
            self._arrays.add(value.ctypes.data)
            self._take(Told(where, value.copy, functools.partial(numpy.copyto, value)))
        else:
            return False
        return True

    def _bytes(self, where: str, value: Any) -> None:
        """Take an object that lies in memory which others may write to."""
        view = memoryview(value)
        if not view.readonly and view.contiguous:
            memory = view.cast("B")

            def write(before: bytes) -> None:
                memory[:] = before

            self._take(Told(where, memory.tobytes, write, "unfollowed"))

    def _iterator(self, where: str, value: Any) -> None:
        """Take one whose place can be told and set; others may not be run by a trace."""
        place = getattr(value, "__reduce__", tuple)() if hasattr(value, "__setstate__") else ()
        if len(place) == 3 and isinstance(place[2], int):
            self._take(
                Told(where, lambda: value.__reduce__()[2:], lambda b: value.__setstate__(*b))
            )
        elif place[:1] != (iter,):  # one that has come to its end stays there
            self.consumed.append(where)

    # --- the user's own code

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            if base in self.classes:
                continue
            self.classes[base] = None
            if str(base.__module__).startswith("torch."):  # where nobody sets any, but somebody may
                self.variables += [(base, variable) for variable in _state(base)]
            if not _is_own_class(base):
                continue
            self._class(type(base))
            if issubclass(base, torch.autograd.Function) and not self._takes_functions:
                continue
            of_class = Attributes(base, functools.partial(_state, base))
            self._take(Table(base.__qualname__, of_class, is_followed=False))
            methods = Attributes(base, functools.partial(_methods, base))
            self._copies.append(Table(base.__qualname__, methods, is_followed=False))
            self.variables += [(base, variable) for variable in (*_state(base), *OF_CLASSES)]
            self._inherited += [(base, name) for name in _inherited_by(base)]
            for name, value in base.__dict__.items():
                if _functions_of(value):
                    self.variables.append((base, name))
                if isinstance(value, property):
                    self._pending += [
                        (name, f) for f in (value.fget, value.fset) if reads_by_names(f)
                    ]
                makes = name in _MAKING and not issubclass(base, nn.Module)
                if makes or name not in _OUTSIDE_OF_CALLS:
                    functions = _functions_of(value)
                    self._pending += [(name, f) for f in functions]
                    if not issubclass(base, nn.Module) and any(map(_closes_over, functions)):
                        self.closing.append(base.__qualname__)

    def _function(self, function: types.FunctionType) -> None:
        if (function.__module__ or "").startswith(_CLOSED):
            return
        name, code = function.__qualname__, function.__code__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._take(Table(name, CellVariable(cell, variable)))
                self.variables.append((cell, "cell_contents"))
        defaults = function.__defaults__ or ()
        given = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        by_name = {**dict(zip(given, defaults, strict=True)), **(function.__kwdefaults__ or {})}
        self._pending += [(f"{name}.{parameter}", v) for parameter, v in by_name.items()]
        self._pending.append((name, getattr(function, "__wrapped__", None)))
        if not is_installed(code.co_filename):
            self._take(Table(name, function.__dict__, is_followed=False))
            self.functions.append(function)
            self.variables += [(function, fact) for fact in OF_FUNCTIONS]
            self._local |= {*code.co_freevars, *by_name}
            names = {n for part in codes_in(code) for n in part.co_names}
            texts = {t for part in codes_in(code) for t in part.co_consts if isinstance(t, str)}
            self._names |= names | texts
            # Attributes may be named as a variable of the script is that changes in each step.
            read = {n for part in codes_in(code) for n in globals_of(part)}
            self._globals(function.__module__ or "", function.__globals__, read)
            for part in codes_in(code):  # in the function
                for module in modules_imported_by(part, function.__globals__):
                    if is_own(module):
                        self._own_modules[module.__name__] = module
            for each in names - function.__globals__.keys():
                if is_own(sys.modules.get(each)):
                    self._own_modules[each] = sys.modules[each]

    def _globals(self, where: str, variables: dict[str, Any], names: set[str]) -> None:
        shared = sorted(names & variables.keys())
        table = Table(where, variables, sorted(names))  # others may be made
        self._copies.append(table)
        # What code does with functions of libraries is told by the code that runs.
        self._pending += [(n, value) for n, value in table.held() if not fact_of(value)]
        self.variables += [(variables, name) for name in shared]
        self.variables += builtins_behind(variables, names)


def named_in(
    home: types.ModuleType, names: Collection[str], depth: int = 2
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Return what names mean in a module and in modules that it holds: a dictionary, the name in it, the object."""
    table = vars(home)
    for name in table.keys() & names:
        value = table[name]
        if not isinstance(value, types.ModuleType):
            yield table, name, value
        elif depth:
            yield from named_in(value, names, depth - 1)


def builtins_behind(variables: dict[str, Any], names: set[str]) -> list[tuple[Any, str]]:
    """Return what decides of names that code finds among Python's own: that no global hides them, and what they are."""
    found = sorted((names - variables.keys()) & vars(builtins).keys())
    return [(table, name) for name in found for table in (variables, vars(builtins))]


def is_looked_into(value: Any) -> bool:
    """Tell whether an object may hold others."""
    return not isinstance(value, (*_LEAVES, type, types.FunctionType, types.ModuleType))


def _is_known_iterator(value: Any) -> bool:
    return type(value).__module__ in _ITERATORS and hasattr(value, "__next__")


def _holds_more_than_bytes(value: Any, numpy: types.ModuleType) -> bool:
    """Tell whether an array holds objects, a mask or attributes."""
    is_masked = isinstance(value, numpy.ma.MaskedArray)
    return value.dtype.hasobject or is_masked or bool(getattr(value, "__dict__", None))


def _set_lock(lock: Any, is_locked: bool) -> None:
    if is_locked:
        lock.acquire(blocking=False)
    else:
        lock.release()


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return where a tensor's elements lie, and how; None where it has none that can be told."""
    if is_fake(tensor) or type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return None
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def home_of(variables: Mapping[str, Any]) -> types.ModuleType | None:
    """Return the module whose globals these are; None where Python knows none."""
    return sys.modules.get(variables.get("__name__", ""))


def is_own(module: types.ModuleType | None) -> bool:
    """Tell whether a module is the user's own code."""
    if not isinstance(module, types.ModuleType) or module.__name__.startswith(_CLOSED):
        return False
    file = file_of(module)
    if file is None:  # of a notebook, of a terminal, or made by hand
        origin = next(iter(vars(module).get("__path__", ())), "")
        return not (_is_standard(module.__name__) or (origin and is_installed(origin)))
    return not is_installed(file)


def _is_standard(module: str) -> bool:
    root = module.partition(".")[0]
    return root in sys.stdlib_module_names or root in sys.builtin_module_names


def _is_own_class(cls: type) -> bool:
    """Tell whether a class is the user's own code, of whatever module that need not be known to Python."""
    name = cls.__module__ if isinstance(cls.__module__, str) else ""
    module = sys.modules.get(name)
    # Classes that the standard library makes for others say that they are its own.
    made = (
        _is_standard(name)
        and is_made_by_a_statement(cls)
        and cls.__qualname__.partition(".")[0] not in vars(module or cls)
    )
    if module is not None and not made:
        return is_own(module)
    if not made and (name.startswith(_CLOSED) or _is_standard(name)):
        return False
    files = [f.__code__.co_filename for v in vars(cls).values() for f in _functions_of(v)]
    return not any(map(is_installed, files))


def _all_slots(cls: type) -> list[str]:
    known = _slots_of.get(cls)
    if known is None:
        known = _slots_of[cls] = [name for base in cls.__mro__ for name in _slots(base)]
    return known


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    private = [f"_{cls.__name__.lstrip('_')}{n}" if _is_private(n) else n for n in names]
    return [n for n in private if n not in ("__dict__", "__weakref__")]


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _state(cls: type) -> Iterator[str]:
    """Return the names of a class's variables, functions aside."""
    descriptors = (types.MemberDescriptorType, types.GetSetDescriptorType)
    for name, value in list(cls.__dict__.items()):
        is_pythons = name.startswith("__") and name in _OF_EVERY_CLASS
        if not (is_pythons or _functions_of(value) or isinstance(value, descriptors)):
            yield name


def _methods(cls: type) -> Iterator[str]:
    """Return the names of a class's functions."""
    return (name for name, value in list(cls.__dict__.items()) if _functions_of(value))


def _inherited_by(cls: type) -> set[str]:
    """Return the names that a class has of its bases, special methods of the user's own among them."""
    found: set[str] = set()
    for base in cls.__mro__[1:]:
        name = base.__module__ if isinstance(base.__module__, str) else ""
        if base is object or name.startswith(_CLOSED) or _is_standard(name):
            continue
        is_users = _is_own_class(base)
        found |= {
            n
            for n, value in list(vars(base).items())
            if not n.startswith("__")
            or (is_users and n not in _OUTSIDE_OF_CALLS and _functions_of(value))
        }
    return found - vars(cls).keys()


def _functions_of(value: Any) -> list[types.FunctionType]:
    """Return the functions behind an entry of a class."""
    found = [value]
    if isinstance(value, (staticmethod, classmethod)):
        found = [value.__func__]
    elif isinstance(value, property):
        found = [value.fget, value.fset]
    elif isinstance(value, functools.cached_property):
        found = [value.func]
    return [f for f in found if isinstance(f, types.FunctionType)]


def _closes_over(function: types.FunctionType) -> bool:
    """Tell whether a function uses variables of one around it; ``super()`` needs one."""
    return any(name != "__class__" for name in function.__code__.co_freevars)
