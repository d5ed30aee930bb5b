# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""State that forward reads by ways that are easy to miss: names made up, objects of C, views of dicts.

In each program a number is read in forward and changed between calls.
"""

from __future__ import annotations

import contextlib
import contextvars
import decimal
import functools
import operator
import sys
import threading
import types
import weakref
from typing import Any

import torch

from conformance.silent.parts import Linear, Reads, train_through
from conformance.silent.program import Session, program

_LEVELS = {"low": 1.0, "high": 2.0}
_context: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


@program()
def attribute_by_a_made_up_name(s: Session) -> None:
    """getattr with a name that is put together, attrgetter, vars and __dict__."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.scale_a, self.scale_b, self.scale_c, self.scale_d = 1.0, 1.0, 1.0, 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = getattr(self, "scale_" + "ab"[0])
            b = operator.attrgetter("_".join(("scale", "b")))(self)
            return self.linear(x) * a * b * vars(self)["scale_c"] * self.__dict__["scale_d"]

    net = Net()
    train_through(
        s, net, *(functools.partial(setattr, net, f"scale_{i}", v) for v, i in enumerate("abcd", 2))
    )


@program()
def global_by_a_made_up_name(s: Session) -> None:
    """globals(), sys.modules and a dict of the module, by names that no code has."""

    def read() -> float:
        module = sys.modules[__name__]
        return globals()["_LEV" + "ELS"]["low"] * getattr(module, "_LE" + "VELS")["high"]

    try:
        train_through(
            s, Reads(read), lambda: _LEVELS.update(low=3.0), lambda: _LEVELS.update(high=0.5)
        )
    finally:
        _LEVELS.update(low=1.0, high=2.0)


@program()
def simple_namespace(s: Session) -> None:
    """A types.SimpleNamespace in another one."""
    config = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0), bias=0.0)

    def replace() -> None:
        config.inner = types.SimpleNamespace(scale=-1.0)

    train_through(
        s,
        Reads(lambda: config.inner.scale + config.bias),
        lambda: setattr(config.inner, "scale", 2.0),
        lambda: setattr(config, "bias", 1.0),
        replace,
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
        train_through(
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
    train_through(
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
    train_through(
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

    train_through(
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

    train_through(s, Net(), lambda: next(walk), lambda: walk.send(10.0))
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
