# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Places in which a module of `conformance.stateful_programs` holds numbers and tensors."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

WIDTH = 4


class Box:
    """An object with attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Slots:
    """An object without a dictionary."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Behind:
    """An object whose attribute is a property with a state."""

    def __init__(self, value: Any) -> None:
        self._value, self._reads = value, 0

    @property
    def value(self) -> Any:
        self._reads = min(self._reads + 1, 1)
        return self._value

    @value.setter
    def value(self, given: Any) -> None:
        self._value = given


class Computed:
    """An object that finds its attributes itself."""

    def __init__(self, value: Any) -> None:
        self.__dict__["entries"] = {"value": value}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["entries"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, given: Any) -> None:
        self.__dict__["entries"][name] = given


@dataclasses.dataclass
class Record:
    """A dataclass."""

    value: Any
    name: str = "record"


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


class Scale(nn.Module):
    """A layer with a number, to be held in a plain list."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> Any:
        return self.value


@dataclasses.dataclass
class Place:
    """Where a module holds a number or a tensor.

    Attributes:
      read: Returns what stands there.
      write: Puts something there.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]


def _attribute(owner: Any, name: str) -> Place:
    return Place(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _item(container: Any, key: Any) -> Place:
    return Place(lambda: container[key], lambda value: container.__setitem__(key, value))


def _named(name: str) -> Callable[[nn.Module, Any], Place]:
    def make(module: nn.Module, value: Any) -> Place:
        setattr(module, name, value)
        return _attribute(module, name)

    return make


def _object(name: str, kind: Callable[[Any], Any]) -> Callable[[nn.Module, Any], Place]:
    def make(module: nn.Module, value: Any) -> Place:
        setattr(module, name, kind(value))
        return _attribute(getattr(module, name), "value")

    return make


def _container(
    name: str, make_one: Callable[[Any], Any], key: Any
) -> Callable[[nn.Module, Any], Place]:
    def make(module: nn.Module, value: Any) -> Place:
        setattr(module, name, make_one(value))
        return _item(getattr(module, name), key)

    return make


def _remade(
    name: str, make_one: Callable[[Any], Any], read: Callable[[Any], Any]
) -> Callable[[nn.Module, Any], Place]:
    """A place in something that cannot be changed, and is made anew."""

    def make(module: nn.Module, value: Any) -> Place:
        setattr(module, name, make_one(value))
        return Place(
            lambda: read(getattr(module, name)),
            lambda given: setattr(module, name, make_one(given)),
        )

    return make


def _cell(module: nn.Module, value: Any) -> Place:
    held = value

    def write(given: Any) -> None:
        nonlocal held
        held = given

    return Place(lambda: held, write)


def _nested(module: nn.Module, value: Any) -> Place:
    module.nest = {"a": [Box(value)]}
    return _attribute(module.nest["a"][0], "value")


def _set_of_one(module: nn.Module, value: Any) -> Place:
    module.only = {value}

    def write(given: Any) -> None:
        module.only.clear()
        module.only.add(given)

    return Place(lambda: next(iter(module.only)), write)


def _array(module: nn.Module, value: Any) -> Place:
    module.array = np.full(2, float(value))
    return Place(
        lambda: float(module.array[0]), lambda given: module.array.__setitem__(0, float(given))
    )


def _default(module: nn.Module, value: Any) -> Place:
    def held(kept: list[Any] = [value]) -> list[Any]:  # noqa: B006
        return kept

    module.default = held
    return Place(lambda: module.default()[0], lambda given: held().__setitem__(0, given))


def _weak(module: nn.Module, value: Any) -> Place:
    module.strong = Box(value)
    module.weak = weakref.ref(module.strong)
    return Place(lambda: module.weak().value, lambda given: setattr(module.weak(), "value", given))


def _first_key(module: nn.Module, value: Any) -> Place:
    module.order = dict.fromkeys([value, 0.0])

    def write(given: Any) -> None:
        kept = [given, *(k for k in module.order if k != given)]
        module.order.clear()
        module.order.update(dict.fromkeys(kept))

    return Place(lambda: next(iter(module.order)), write)


def _class_attribute(module: nn.Module, value: Any) -> Place:
    module.kind = type("Kind", (), {"value": value, "__module__": __name__})
    return _attribute(module.kind, "value")


def _layer_in_a_list(module: nn.Module, value: Any) -> Place:
    module.hidden = [Scale(value)]
    return Place(
        lambda: module.hidden[0](), lambda given: setattr(module.hidden[0], "value", given)
    )


def _context(module: nn.Module, value: Any) -> Place:
    module.context = contextvars.ContextVar("context", default=None)
    module.context.set(value)
    return Place(module.context.get, module.context.set)


def _layers_attribute(module: nn.Module, value: Any) -> Place:
    module.layer.n = value
    return _attribute(module.layer, "n")


def _late(
    name: str, owner_of: Callable[[nn.Module, Any], Any]
) -> Callable[[nn.Module, Any], Place]:
    """A place that is not there before somebody writes to it.

    Args:
      name: Of an attribute of the module.
      owner_of: Makes what has the attribute, and an object that is asked for it, from a class of the program's own.
    """

    def make(module: nn.Module, value: Any) -> Place:
        kind = type("Late", (), {"__module__": __name__})
        owner, asked = owner_of(module, kind)
        setattr(module, name, asked)
        return Place(
            lambda: getattr(getattr(module, name), "late", value),
            lambda given: setattr(owner, "late", given),
        )

    return make


def _with_metaclass(module: nn.Module, kind: type) -> tuple[type, type]:
    meta = type("LateMeta", (type,), {"__module__": __name__})
    return meta, meta("OfLateMeta", (), {"__module__": __name__})


def _in_a_module(module: nn.Module, kind: type) -> tuple[Any, Any]:
    made = types.ModuleType("late_module")
    return made, made


def _of_a_layer(module: nn.Module, kind: type) -> tuple[Any, Any]:
    own = type("LateScale", (Scale,), {"__module__": __name__})
    return own, own(1.0)


def _tried(module: nn.Module, value: Any) -> Place:
    kind = type("Tried", (), {"__module__": __name__})
    module.tried = kind()

    def read() -> Any:
        try:
            return module.tried.late
        except AttributeError:
            return value

    return Place(read, lambda given: setattr(kind, "late", given))


def _truth(module: nn.Module, value: Any) -> Place:
    """A special method that a class does not have at first."""
    kind = type("Truth", (), {"__module__": __name__})
    module.truth = kind()

    def write(given: Any) -> None:
        is_true = float(given) > 2
        kind.__bool__ = lambda self: is_true  # type: ignore[attr-defined]

    return Place(lambda: value if module.truth else 0.5, write)


# Of numbers: the module and the number.
NUMBERS: dict[str, Callable[[nn.Module, float], Place]] = {
    "attribute": _named("number"),
    "layer's attribute": _layers_attribute,
    "object": _object("box", Box),
    "slots": _object("slots", Slots),
    "property": _object("behind", Behind),
    "computed attribute": _object("computed", Computed),
    "dataclass": _object("record", Record),
    "namespace": _object("space", lambda v: types.SimpleNamespace(value=v)),
    "class": _class_attribute,
    "list": _container("rows", lambda v: [0, v], 1),
    "deque": _container("queue", lambda v: collections.deque([v, 1]), 0),
    "dictionary": _container("table", lambda v: {"a": v}, "a"),
    "ordered dictionary": _container("ordered", lambda v: collections.OrderedDict(a=v), "a"),
    "counter": _container("counts", lambda v: collections.Counter(a=int(v)), "a"),
    "defaultdict": _container("defaults", lambda v: collections.defaultdict(int, a=v), "a"),
    "order of keys": _first_key,
    "tuple": _remade("pair", lambda v: Pair(v, 0), lambda pair: pair.first),
    "partial": _remade("bound", lambda v: functools.partial(float.__add__, v), lambda f: f(0.0)),
    "proxy": _remade("proxy", lambda v: types.MappingProxyType({"a": v}), lambda p: p["a"]),
    "nested": _nested,
    "closure": _cell,
    "default of a function": _default,
    "weak reference": _weak,
    "context variable": _context,
    "layer in a list": _layer_in_a_list,
    "set": _set_of_one,
    "not there: class": _late("late_class", lambda m, kind: (kind, kind)),
    "not there: class of an object": _late("late_object", lambda m, kind: (kind, kind())),
    "not there: base of its class": _late(
        "late_base", lambda m, kind: (kind, type("Below", (kind,), {"__module__": __name__})())
    ),
    "not there: metaclass": _late("late_meta", _with_metaclass),
    "not there: module": _late("late_module", _in_a_module),
    "not there: class of a layer": _late("late_layer_class", _of_a_layer),
    "not there: error": _tried,
    "not there: special method": _truth,
    "array": _array,
}


def _buffer(module: nn.Module, value: torch.Tensor) -> Place:
    module.register_buffer("kept", value)
    return _attribute(module, "kept")


def _row_of_a_parameter(module: nn.Module, value: torch.Tensor) -> Place:
    module.row = module.layer.weight.detach()[0]
    return _attribute(module, "row")


def _memory_of_an_array(module: nn.Module, value: torch.Tensor) -> Place:
    module.memory = value.numpy().copy()
    module.shared = torch.from_numpy(module.memory)
    return Place(
        lambda: module.shared, lambda given: np.copyto(module.memory, given.detach().numpy())
    )


def _free_parameter(module: nn.Module, value: torch.Tensor) -> Place:
    module.free = [nn.Parameter(value)]
    return _item(module.free, 0)


# Of tensors: the module and the tensor.
TENSORS: dict[str, Callable[[nn.Module, torch.Tensor], Place]] = {
    "buffer": _buffer,
    "plain attribute": _named("plain"),
    "list": _container("outside", lambda v: [v], 0),
    "dictionary": _container("tables", lambda v: {"a": v}, "a"),
    "object": _object("held", Box),
    "slots": _object("held_in_slots", Slots),
    "dataclass": _object("held_in_record", Record),
    "property": _object("held_behind", Behind),
    "tuple": _remade("held_pair", lambda v: Pair(v, None), lambda pair: pair.first),
    "partial": _remade("held_bound", lambda v: functools.partial(torch.add, v), lambda f: f(0)),
    "closure": _cell,
    "default of a function": _default,
    "weak reference": _weak,
    "class": _class_attribute,
    "row of a parameter": _row_of_a_parameter,
    "memory of an array": _memory_of_an_array,
    "parameter in a list": _free_parameter,
}
