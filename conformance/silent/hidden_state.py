# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""State that forward reads by ways that are easy to miss: names made up, objects of C, views of dicts.

In each program a number is read in forward and changed between calls.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import decimal
import functools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from conformance.silent.program import Session, program

_LEVELS = {"low": 1.0, "high": 2.0}
_context: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


class Reads(nn.Module):
    """A layer whose output is scaled by what a function returns."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output times the number."""
        return self.linear(x) * float(self.read())


def _show(s: Session, net: nn.Module, *changes: Callable[[], Any]) -> None:
    """Train twice, then once after each change."""
    model = s.wrap(net)
    s.train(model, s.leaf(3, 4))
    s.train(model, s.leaf(3, 4))
    for change in changes:
        change()
        s.train(model, s.leaf(3, 4))


@program()
def attribute_by_a_made_up_name(s: Session) -> None:
    """getattr with a name that is put together, attrgetter, vars and __dict__."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.scale_a, self.scale_b, self.scale_c, self.scale_d = 1.0, 1.0, 1.0, 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = getattr(self, "scale_" + "ab"[0])
            b = operator.attrgetter("_".join(("scale", "b")))(self)
            return self.linear(x) * a * b * vars(self)["scale_c"] * self.__dict__["scale_d"]

    net = Net()
    _show(
        s, net, *(functools.partial(setattr, net, f"scale_{i}", v) for v, i in enumerate("abcd", 2))
    )


@program()
def global_by_a_made_up_name(s: Session) -> None:
    """globals(), sys.modules and a dict of the module, by names that no code has."""

    def read() -> float:
        module = sys.modules[__name__]
        return globals()["_LEV" + "ELS"]["low"] * getattr(module, "_LE" + "VELS")["high"]

    try:
        _show(s, Reads(read), lambda: _LEVELS.update(low=3.0), lambda: _LEVELS.update(high=0.5))
    finally:
        _LEVELS.update(low=1.0, high=2.0)


@program()
def simple_namespace(s: Session) -> None:
    """A types.SimpleNamespace in another one."""
    config = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0), bias=0.0)

    def replace() -> None:
        config.inner = types.SimpleNamespace(scale=-1.0)

    _show(
        s,
        Reads(lambda: config.inner.scale + config.bias),
        lambda: setattr(config.inner, "scale", 2.0),
        lambda: setattr(config, "bias", 1.0),
        replace,
    )


@program()
def mappings_around_a_dict(s: Session) -> None:
    """A MappingProxyType, a ChainMap, a UserDict and a dict's view show what the dict has now."""
    table = {"scale": 1.0}
    proxy, chain = types.MappingProxyType(table), collections.ChainMap({}, table)
    user, view = collections.UserDict(table), table.values()

    def read() -> float:
        return proxy["scale"] * chain["scale"] + sum(view) + user["scale"]

    _show(
        s,
        Reads(read),
        lambda: table.update(scale=2.0),
        lambda: chain.update(scale=3.0),
        lambda: user.update(scale=4.0),
        lambda: table.update(more=1.0),
    )


@program()
def buffers_of_bytes(s: Session) -> None:
    """A bytearray, a memoryview, an array.array and a scalar of NumPy in an array of no dimensions."""
    raw, numbers, scalar = bytearray(b"\x01\x02"), array.array("d", [1.0]), np.array(1.0)
    view = memoryview(raw)

    def change_scalar() -> None:
        scalar[()] = 3.0

    _show(
        s,
        Reads(lambda: raw[0] * view[1] * numbers[0] * float(scalar)),
        lambda: operator.setitem(raw, 0, 5),
        lambda: operator.setitem(view, 1, 1),
        lambda: operator.setitem(numbers, 0, 2.0),
        change_scalar,
    )


@program()
def context_variables(s: Session) -> None:
    """A ContextVar, a threading.local and the context of decimal arithmetic."""
    local = threading.local()
    local.scale = 1.0
    before = decimal.getcontext().prec

    def read() -> float:
        return _context.get() * local.scale + float(decimal.Decimal(1) / 3)

    try:
        _show(
            s,
            Reads(read),
            lambda: _context.set(2.0),
            lambda: setattr(local, "scale", 3.0),
            lambda: setattr(decimal.getcontext(), "prec", 1),
        )
    finally:
        decimal.getcontext().prec = before
        _context.set(1.0)


@program()
def partial_and_its_keywords(s: Session) -> None:
    """A functools.partial whose keywords are changed where they are, and a bound method's object."""

    class Gain:
        value = 1.0

        def get(self, offset: float) -> float:
            return self.value + offset

    gain = Gain()
    made = functools.partial(gain.get, offset=0.0)
    _show(
        s,
        Reads(made),
        lambda: made.keywords.update(offset=1.0),
        lambda: setattr(gain, "value", 5.0),
        lambda: setattr(Gain, "get", lambda self, offset: 7.0),
    )


@program()
def defaults_of_functions(s: Session) -> None:
    """A function's defaults, its attributes and its code are exchanged."""

    def read(scale: float = 1.0, *, offset: float = 0.0) -> float:
        return scale + offset + read.more  # type: ignore[attr-defined]

    def other(scale: float = 1.0, *, offset: float = 0.0) -> float:
        return scale * 10 + read.more - read.more  # type: ignore[attr-defined]

    read.more = 0.0  # type: ignore[attr-defined]
    _show(
        s,
        Reads(read),
        lambda: setattr(read, "__defaults__", (2.0,)),
        lambda: operator.setitem(read.__kwdefaults__, "offset", 3.0),
        lambda: setattr(read, "more", 1.0),
        lambda: setattr(read, "__code__", other.__code__),
    )


@program()
def objects_behind_weak_references(s: Session) -> None:
    """A weak reference, a WeakValueDictionary and a weak proxy of one object."""

    class Gain:
        value = 1.0

    gain, other = Gain(), Gain()
    other.value = 4.0
    reference, proxy = weakref.ref(gain), weakref.proxy(gain)
    table: weakref.WeakValueDictionary[str, Gain] = weakref.WeakValueDictionary(gain=gain)

    def read() -> float:
        return reference().value * proxy.value + table["gain"].value  # type: ignore[union-attr]

    _show(
        s,
        Reads(read),
        lambda: setattr(gain, "value", 2.0),
        lambda: operator.setitem(table, "gain", other),
        lambda: setattr(other, "value", 5.0),
    )


@program()
def generator_held_by_a_function(s: Session) -> None:
    """A generator that forward advances by send, and that the caller advances too."""

    def steps() -> Any:
        value = 1.0
        while True:
            got = yield value
            value = value + 1 if got is None else got

    walk = steps()

    class Net(Reads):
        def __init__(self) -> None:
            super().__init__(lambda: next(walk))

    _show(s, Net(), lambda: next(walk), lambda: walk.send(10.0))
    s.see("next", next(walk))


@program()
def context_manager_around_the_call(s: Session) -> None:
    """An ExitStack and a context manager of the caller's set an option around the call."""
    options = {"scale": 1.0}

    @contextlib.contextmanager
    def scaled(value: float) -> Any:
        before, options["scale"] = options["scale"], value
        try:
            yield
        finally:
            options["scale"] = before

    model = s.wrap(Reads(lambda: options["scale"]))
    s.train(model, s.leaf(3, 4))
    for value in (1.0, 2.0, 3.0):
        with contextlib.ExitStack() as stack:
            stack.enter_context(scaled(value))
            s.train(model, s.leaf(3, 4))
    s.train(model, s.leaf(3, 4))


@program()
def nested_containers(s: Session) -> None:
    """A list in a tuple in a named tuple in a dict in a frozen dataclass's attribute."""
    Pair = collections.namedtuple("Pair", ("left", "right"))
    deep = {"pair": Pair(([1.0],), {"b": (2.0, [3.0])})}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.deep = deep

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pair = self.deep["pair"]
            return self.linear(x) * pair.left[0][0] + pair.right["b"][1][-1]

    def replace() -> None:
        deep["pair"] = Pair(([5.0],), {"b": (2.0, [3.0])})

    _show(
        s,
        Net(),
        lambda: operator.setitem(deep["pair"].left[0], 0, 2.0),
        lambda: deep["pair"].right["b"][1].append(7.0),
        replace,
    )


@program(coarse=torch.float32)
def types_and_dtypes_as_attributes(s: Session) -> None:
    """A dtype, a class, a slice, a range and a string of einsum are attributes that change."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.dtype: torch.dtype = torch.float32
            self.cls: type[nn.Module] = nn.ReLU
            self.part: Any = slice(0, 2)
            self.steps = range(2)
            self.equation = "ij,kj->ik"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.cls()(self.linear(x)).to(self.dtype)[:, self.part]
            for step in self.steps:
                y = y + step
            return torch.einsum(self.equation, y, y)

    net = Net()
    _show(
        s,
        net,
        lambda: setattr(net, "dtype", torch.float64),
        lambda: setattr(net, "cls", nn.Tanh),
        lambda: setattr(net, "part", slice(1, 3)),
        lambda: setattr(net, "steps", range(1, 3)),
        lambda: setattr(net, "equation", "ij,kj->ki"),
    )


@program()
def properties_of_layers(s: Session) -> None:
    """Strides, paddings, epsilon, slopes and probabilities of PyTorch's own layers are changed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 3)
            self.norm, self.act, self.pool = nn.LayerNorm(3), nn.LeakyReLU(0.1), nn.AvgPool1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.pool(self.conv(x))
            return self.act(self.norm(y.transpose(1, 2)))

    net = Net()
    model = s.wrap(net)
    changes: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: setattr(net.conv, "stride", (2,)),
        lambda: setattr(net.conv, "padding", (2,)),
        lambda: setattr(net.norm, "eps", 1.0),
        lambda: setattr(net.act, "negative_slope", 0.7),
        lambda: setattr(net.pool, "kernel_size", 3),
    )
    for change in changes:
        change()
        s.train(model, s.leaf(2, 2, 12))
