# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules that differ in one thing that their forward reads share no graph on disk."""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import json
import logging
import math
import os
import string
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from os import getpid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conformance.stateful_programs import Captures, difference
from ortrain import ORTModule, _core
from ortrain.capture import cache, source_files
from ortrain.capture.compared_state import digest_of_compared, variables_of
from ortrain.capture.signature import CallSignature
from ortrain.capture.value_digest import Unkeyable

pytestmark = pytest.mark.slow  # a capture or two per case, half a minute in all

NUMBERS = [1.0]
FACTOR = contextvars.ContextVar("factor", default=1.0)


@pytest.fixture(autouse=True)
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Path]:
    """A cache of the test's own; sources may be edited while the tests run.

    A failure shows why graphs were not kept or not used.
    """
    caplog.set_level(logging.DEBUG, "ortrain")
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(source_files, "process_start", lambda: math.inf)
    yield tmp_path / "cache"


class Reading(nn.Module):
    """Multiplies by what a function makes of an object that it holds.

    Args:
      held: The object.
      read: The function.
    """

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held = held
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(self.held)


class Slots:
    __slots__ = ("__hidden", "value")

    def __init__(self, value: float, hidden: float = 1.0) -> None:
        self.value, self.__hidden = value, hidden

    def product(self) -> float:
        return self.value * self.__hidden


@dataclasses.dataclass
class Generated:
    """Its comparisons are functions without a source."""

    value: float

    def __mul__(self, other: float) -> float:
        return self.value * other


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Number(float):
    """A number of a class of its own."""


class Kind:
    value = 1.0

    def scaled(self, by: float = 1.0) -> float:
        return self.value * by


class Reached:
    """What a weak reference may lead to."""

    def __init__(self, value: float) -> None:
        self.value = value


def ordered(second: bool) -> nn.Module:
    held = collections.OrderedDict(a=2.0, b=3.0)
    if second:
        held.move_to_end("a")
    return Reading(held, lambda d: next(iter(d.values())))


def closing(second: bool) -> nn.Module:
    factor = 1.0 + second

    def read(_: Any) -> float:
        return factor

    return Reading(None, read)


def with_default(second: bool) -> nn.Module:
    def read(_: Any, factor: float = 1.0 + second) -> float:
        return factor

    return Reading(None, read)


def with_keyword_default(second: bool) -> nn.Module:
    def read(_: Any, *, factor: float = 1.0 + second) -> float:
        return factor

    return Reading(None, read)


def partial_attribute(second: bool) -> nn.Module:
    held = functools.partial(len)
    held.factor = 1.0 + second
    return Reading(held, lambda p: p.factor)


def function_attribute(second: bool) -> nn.Module:
    def held() -> None: ...

    held.factor = 1.0 + second
    return Reading(held, lambda f: f.factor)


def global_list(second: bool) -> nn.Module:
    NUMBERS[:] = [1.0 + second]
    return Reading(None, lambda _: NUMBERS[0])


def class_attribute(second: bool) -> nn.Module:
    Kind.value = 1.0 + second
    return Reading(Kind(), lambda k: k.scaled())


def local_class_attribute(second: bool) -> nn.Module:
    class Held:
        value = 1.0 + second

    return Reading(Held(), lambda k: k.value)


def attribute_of_member(second: bool) -> nn.Module:
    Level.HIGH.factor = 1.0 + second
    return Reading(Level.HIGH, lambda level: level.factor)


def member(second: bool) -> nn.Module:
    return Reading(Level.HIGH if second else Level.LOW, lambda level: 1.0 + (level.name == "HIGH"))


def weak_target(second: bool) -> nn.Module:
    target = Reached(1.0 + second)
    module = Reading(weakref.ref(target), lambda r: r().value)
    module.__dict__["_keeps"] = [target]
    return module


def weak_set_of_one(second: bool) -> nn.Module:
    target = Reached(1.0 + second)
    module = Reading(weakref.WeakSet([target]), lambda s: sum(r.value for r in s))
    module.__dict__["_keeps"] = [target]
    return module


def aliased(second: bool) -> nn.Module:
    one = [1.0]
    return Reading([one, [1.0] if second else one], lambda p: 2.0 if p[0] is p[1] else 3.0)


def with_limit(second: bool) -> nn.Module:
    return Reading(collections.deque([1.0], 2 + second), lambda d: float(d.maxlen))


def with_factory(second: bool) -> nn.Module:
    held = collections.defaultdict(float if second else int)
    return Reading(held, lambda d: 2.0 + (d.default_factory is int))


def context_variable(second: bool) -> nn.Module:
    FACTOR.set(1.0 + second)
    return Reading(FACTOR, lambda v: v.get())


def of_other_object(second: bool) -> nn.Module:
    held = Kind()
    held.value = 1.0 + second
    return Reading(held.scaled, lambda method: method(2.0))


def method_in_c(second: bool) -> nn.Module:
    FACTOR.set(1.0 + second)
    return Reading(FACTOR.get, lambda get: get())


def generated_function(second: bool) -> nn.Module:
    return Reading(eval(f"lambda: {1.0 + second}"), lambda f: f())


def hidden_slot(second: bool) -> nn.Module:
    return Reading(Slots(1.0, 1.0 + second), lambda s: s.product())


def number_with_attribute(second: bool) -> nn.Module:
    held = Number(1.0)
    held.factor = 1.0 + second
    return Reading(held, lambda n: n.factor)


def of_module(second: bool) -> nn.Module:
    json.ortrain_factor = 1.0 + second
    return Reading(None, lambda _: json.ortrain_factor)


def order_of_set(second: bool) -> nn.Module:
    held = {8, 0}  # which collide in a table of eight
    if second:
        held = {0}
        held.add(8)
    return Reading(held, lambda s: 1.0 + next(iter(s)))


def of(first: Any, second: Any, read: Callable[[Any], Any]) -> Callable[[bool], nn.Module]:
    return lambda other: Reading(second if other else first, read)


CASES: dict[str, Callable[[bool], nn.Module]] = {
    "order of a dictionary": of(
        {"a": 2.0, "b": 3.0}, {"b": 3.0, "a": 2.0}, lambda d: [*d.values()][0]
    ),
    "order of an OrderedDict": ordered,
    "slot": of(Slots(1.0), Slots(2.0), lambda s: s.value),
    "hidden slot": hidden_slot,
    "dataclass": of(Generated(1.0), Generated(2.0), lambda g: g * 1.0),
    "cell": closing,
    "default": with_default,
    "keyword default": with_keyword_default,
    "argument of a partial": of(
        functools.partial(max, 1.0), functools.partial(max, 2.0), lambda p: p(0.0)
    ),
    "attribute of a partial": partial_attribute,
    "attribute of a function": function_attribute,
    "global list": global_list,
    "value in a set": of({1.0, 2.0}, {1.0, 3.0}, sum),
    "type in a set": of(
        {1}, {1.0}, lambda s: next(iter(s)) / 3 if isinstance([*s][0], int) else 2.0
    ),
    "order of a set": order_of_set,
    "frozenset": of(frozenset({1.0}), frozenset({2.0}), sum),
    "weak reference": weak_target,
    "weak set": weak_set_of_one,
    "class attribute": class_attribute,
    "local class": local_class_attribute,
    "enum": member,
    "attribute of a member": attribute_of_member,
    "sign of zero": of(0.0, -0.0, lambda z: math.copysign(1.0, z)),
    "sign of a complex zero": of(0j, complex(-0.0, 0.0), lambda z: math.copysign(1.0, z.real)),
    "type of a number": of(1, 1.0, lambda n: 2.0 if isinstance(n, float) else 3.0),
    "bool": of(1, True, lambda n: 2.0 if isinstance(n, bool) else 3.0),
    "number of a class": of(Number(1.0), Number(2.0), lambda n: float(n)),
    "attribute of a number": number_with_attribute,
    "aliased lists": aliased,
    "array": of(np.array([1.0]), np.array([2.0]), lambda a: float(a[0])),
    "dtype of an array": of(
        np.zeros(2, np.float32), np.zeros(1, np.float64), lambda a: float(a.itemsize)
    ),
    "number of NumPy": of(np.float64(1.0), np.float64(2.0), float),
    "bytearray": of(bytearray(b"\1"), bytearray(b"\2"), lambda b: float(b[0])),
    "array of the standard library": of(
        array.array("d", [1.0]), array.array("d", [2.0]), lambda a: a[0]
    ),
    "tensor in a list": of([torch.tensor(1.0)], [torch.tensor(2.0)], lambda t: t[0]),
    "order of a tensor": of(
        torch.zeros(2, 2), torch.zeros(2, 2).t(), lambda t: 1.0 + t.is_contiguous()
    ),
    "limit of a deque": with_limit,
    "factory": with_factory,
    "context variable": context_variable,
    "keys": of({"a": 1}.keys(), {"bb": 1}.keys(), lambda k: float(len(next(iter(k))))),
    "proxy": of(
        types.MappingProxyType({"a": 1.0}), types.MappingProxyType({"a": 2.0}), lambda p: p["a"]
    ),
    "bytes": of(b"a", b"bb", len),
    "method of another object": of_other_object,
    "method in C": method_in_c,
    "generated function": generated_function,
    "attribute of an installed module": of_module,
    "namespace": of(types.SimpleNamespace(a=1.0), types.SimpleNamespace(a=2.0), lambda n: n.a),
    "range": of(range(1, 3), range(2, 3), lambda r: float(r.start)),
    "Counter": of(collections.Counter("a"), collections.Counter("aa"), lambda c: float(c["a"])),
    "exception": of(ValueError(1.0), ValueError(2.0), lambda e: e.args[0]),
}

# Tensors outside of the module, and objects that Python does not show.
NOT_KEPT = ("tensor in a list", "weak set", "exception")

SETTINGS: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "default dtype": (torch.set_default_dtype, torch.float32, torch.float64),
    "deterministic": (torch.use_deterministic_algorithms, False, True),
    "deterministic, with warnings": (torch.set_deterministic_debug_mode, 0, 1),
    "precision": (torch.set_float32_matmul_precision, "highest", "high"),
}


def run(module: nn.Module) -> tuple[torch.Tensor, list[bool]]:
    ours = ORTModule(module)
    result = ours(torch.ones(2, 2))
    records = ours.report().captures
    logging.getLogger("ortrain.cache").debug("captures: %s", records)
    return result, [record.from_disk for record in records]


@pytest.mark.sampled(16)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_what_a_forward_reads_is_told_apart(name: str) -> None:
    try:
        for second in (False, True, False):
            module = CASES[name](second)
            expected = module(torch.ones(2, 2))
            found, from_disk = run(module)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), second
        assert from_disk == [name not in NOT_KEPT]
    finally:
        put_back()


def put_back() -> None:
    vars(json).pop("ortrain_factor", None)
    Kind.value, NUMBERS[:] = 1.0, [1.0]
    FACTOR.set(1.0)


def turn_into(module: nn.Module, other: nn.Module) -> None:
    """Let a module hold what another one holds, and run another function only where that holds something too."""
    module.held = other.held
    names = "__closure__", "__defaults__", "__kwdefaults__"
    if any(getattr(other.read, name, None) for name in names):
        module.read = other.read
    module.__dict__["_keeps"] = other.__dict__.get("_keeps")


SEEN_IN_MEMORY = (
    *("type in a set", "order of a set", "sign of a complex zero", "attribute of a partial"),
    *("factory", "limit of a deque", "context variable", "method in C"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SEEN_IN_MEMORY)
def test_what_a_forward_reads_is_seen_in_memory(name: str) -> None:
    module, x = CASES[name](False), torch.ones(2, 2)
    ours = ORTModule(module)
    try:
        for second in (False, True, False):
            turn_into(module, CASES[name](second))
            assert torch.equal(ours(x), module(x)), second
    finally:
        put_back()


@pytest.mark.parametrize("name", [n for n in CASES if n != "attribute of an installed module"])
def test_where_a_guard_fails_the_digest_of_what_it_compares_is_another(name: str) -> None:
    module = CASES[name](False)
    variables = variables_of(module, None)
    guard = _core.ModuleGuard(list(module.modules()), None, variables)
    try:
        before = described(module)
        assert guard.holds()
        turn_into(module, CASES[name](True))
        assert not guard.holds()
        assert before is None or described(module) != before
    finally:
        put_back()


def described(module: nn.Module) -> str | None:
    try:
        return digest_of_compared(module, None, variables_of(module, None), ())
    except Unkeyable:
        return None


def imported_in_the_function(_: Any) -> float:
    import platform

    return float(len(platform.node()))


OF_THE_PROCESS: dict[str, Callable[[Any], float]] = {
    "os": lambda _: float(os.getpid()),
    "function of os": lambda _: float(getpid()),
    "sys": lambda held: float(sys.getrefcount(held)),
    "hash": lambda _: float(hash("a")),
    "id": lambda held: float(id(held)),
    "threads of PyTorch": lambda _: float(torch.get_num_threads()),
    "devices": lambda _: float(torch.cuda.device_count()),
    "rank": lambda _: float(torch.distributed.get_rank()),
    "thread": lambda _: float(threading.get_ident()),
    "machine": imported_in_the_function,
}


@pytest.mark.parametrize("name", OF_THE_PROCESS)
def test_what_another_process_is_told_otherwise_has_no_key(name: str) -> None:
    module = Reading(None, OF_THE_PROCESS[name])
    call = CallSignature(module.forward).flatten((torch.ones(2, 2),), {})
    with pytest.raises(Unkeyable, match="of the process|reads"):
        cache._key(module, call)


def test_what_modules_hold_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Reading(None, lambda _: float(len(string.digits)) + len(os.sep))
    call = CallSignature(module.forward).flatten((torch.ones(2, 2),), {})
    before = cache._key(module, call)
    monkeypatch.setattr(string, "digits", "abc")
    assert cache._key(module, call) != before


@pytest.mark.filterwarnings("ignore")
def test_random_programs_whose_graphs_come_from_disk() -> None:
    captures = Captures()
    told = {seed: difference(seed, captures) for seed in (1, 2, 3, 5, 6, 9, 11)}
    assert set(told.values()) == {""}, told
    assert captures.from_disk >= 5 and captures.made >= 30


class Making(nn.Module):
    """Makes a tensor of the default dtype, and a product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x + torch.ones(2, 2)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_pytorch_are_told_apart(name: str) -> None:
    setting, first, second = SETTINGS[name]
    module, x = Making(), torch.ones(2, 2)
    seen = []
    try:
        for value in (first, second, first, second):
            setting(value)
            ours = ORTModule(module)
            found = ours(x)
            assert found.dtype == module(x).dtype
            seen.append([record.from_disk for record in ours.report().captures])
    finally:
        setting(first)
    assert seen == [[False], [False], [True], [True]]
