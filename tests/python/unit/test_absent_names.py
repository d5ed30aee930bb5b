# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a forward asked for in vain, and somebody makes later: attributes of classes and modules, special methods."""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule, _core

pytestmark = pytest.mark.filterwarnings("ignore:.* runs in pieces")
settings = types.ModuleType("tests_absent_settings")
sys.modules["tests_absent_settings"] = settings


class Meta(type):
    """A metaclass of the user's own."""


class Thing:
    """What a module holds."""


class Slotted:
    """What has no dictionary."""

    __slots__ = ("late",)


class OfMeta(metaclass=Meta):
    """A class of a metaclass."""


@dataclasses.dataclass
class Options:
    """What a module holds."""

    scale: float = 1.0


class Scaling(nn.Module):
    """A module that multiplies by what it finds."""

    def __init__(self, factor: Callable[[Any], float], held: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.factor = factor
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor(self)


class Counting(Scaling):
    """The same in pieces."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = super().forward(x)
        return y + 1 if y.sum() > 1e6 else y


def tried(module: Any) -> float:
    try:
        return module.held.late
    except AttributeError:
        return 1.0


def imported(module: Any) -> float:
    import tests_absent_settings

    return getattr(tests_absent_settings, "late", 1.0)


# What asks, what is held, where something is made later.
ASKED: dict[str, tuple[Callable[[Any], float], Any, Any]] = {
    "its class": (lambda m: getattr(m, "late", 1.0), None, Scaling),
    "its class by type": (lambda m: getattr(type(m), "late", 1.0), None, Scaling),
    "class of a layer": (lambda m: getattr(m.linear, "late", 1.0), None, nn.Linear),
    "all layers": (lambda m: getattr(m.linear, "late", 1.0), None, nn.Module),
    "object's class": (lambda m: getattr(m.held, "late", 1.0), Thing(), Thing),
    "object": (lambda m: getattr(m.held, "late", 1.0), held := Thing(), held),
    "slot": (lambda m: getattr(m.held, "late", 1.0), slotted := Slotted(), slotted),
    "class": (lambda m: getattr(m.held, "late", 1.0), Thing, Thing),
    "dataclass": (lambda m: getattr(m.held, "late", 1.0), Options(), Options),
    "metaclass": (lambda m: getattr(m.held, "late", 1.0), OfMeta, Meta),
    "error": (tried, Thing(), Thing),
    "hasattr": (lambda m: 2.0 if hasattr(m.held, "late") else 1.0, Thing(), Thing),
    "names of a class": (lambda m: float(len(vars(m.held))), Thing, Thing),
    "module": (lambda m: getattr(settings, "late", 1.0), None, settings),
    "module that is held": (lambda m: getattr(m.held, "late", 1.0), settings, settings),
    "module that is imported": (imported, None, settings),
}


@typing.runtime_checkable
class Going(typing.Protocol):
    """What has a method."""

    def late(self) -> None: ...


class Number(int):
    """A number of a class of the user's own."""


def loaded(module: Any) -> float:
    try:
        import tests_absent_module  # type: ignore[import-not-found]
    except ImportError:
        return 1.0
    return tests_absent_module.FACTOR


def answer(name: str) -> float:
    if name != "late":
        raise AttributeError(name)
    return 3.0


# What asks, what is held, how it comes to be there, what is taken away again.
OTHERS: dict[str, tuple[Callable[[Any], float], Any, Any, str, Any]] = {
    "import": (loaded, None, sys.modules, "tests_absent_module", types.SimpleNamespace(FACTOR=3.0)),
    "module that answers": (
        lambda m: getattr(settings, "late", 1.0),
        None,
        settings,
        "__getattr__",
        answer,
    ),
    "number of an own class": (lambda m: m.held + 1, Number(2), Number, "__add__", lambda a, b: 30),
    "protocol": (
        lambda m: 3.0 if isinstance(m.held, Going) else 1.0,
        Thing(),
        Thing,
        "late",
        lambda self: 1,
    ),
    "functions of PyTorch": (
        lambda m: getattr(nn.functional, "late", 1.0),
        None,
        nn.functional,
        "late",
        3.0,
    ),
    "tensors": (
        lambda m: getattr(m.linear.weight * 1, "late", 1.0),
        None,
        torch.Tensor,
        "late",
        3.0,
    ),
}


@pytest.mark.parametrize("asked", OTHERS)
def test_what_comes_in_other_ways_is_found(asked: str) -> None:
    factor, held, owner, name, value = OTHERS[asked]
    module = Scaling(factor, held)
    wrapped = ORTModule(module)
    x = torch.randn(4, 3)

    def is_same() -> bool:
        return bool(torch.allclose(wrapped(x), module.forward(x), atol=1e-6))

    before = wrapped(x)
    assert is_same()
    table = owner if owner is sys.modules else None
    try:
        table.update({name: value}) if table is not None else setattr(owner, name, value)
        assert not torch.allclose(before, module.forward(x)) and is_same()
    finally:
        table.pop(name) if table is not None else delattr(owner, name)
    assert is_same()


def test_a_module_that_answers_anything_is_asked_for_no_file() -> None:
    strange = types.ModuleType("tests_strange_module")
    strange.__getattr__ = lambda name: 3.0  # type: ignore[method-assign]
    module = Scaling(lambda m: strange.factor, strange)
    wrapped = ORTModule(module)
    x = torch.randn(4, 3)
    torch.testing.assert_close(wrapped(x), module.forward(x))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for owner in {id(each[2]): each[2] for each in ASKED.values()}.values():
        if "late" in getattr(owner, "__dict__", {}):
            del owner.late


@pytest.fixture
def all_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run pieces that are too small to gain by it on the engine, too."""
    monkeypatch.setenv("ORTRAIN_PIECES", "all")


@pytest.mark.usefixtures("all_pieces")
@pytest.mark.parametrize("kind", [Scaling, Counting])
@pytest.mark.parametrize("asked", ASKED)
def test_what_is_made_later_is_found(asked: str, kind: type[Scaling]) -> None:
    factor, held, owner = ASKED[asked]
    if kind is Counting and asked == "slot":
        owner.late = 1.0
    module = kind(factor, held)
    plain = copy.copy(module)
    wrapped = ORTModule(module)
    x = torch.randn(4, 3)

    def is_same() -> bool:
        result = wrapped(x)
        result.sum().backward()
        return bool(torch.allclose(result, plain(x), atol=1e-6))

    assert is_same() and is_same()
    owner.late = 3.0
    assert is_same()
    owner.late = 2.0
    assert is_same()
    if asked != "slot":
        del owner.late
        assert is_same()


SPECIAL: dict[str, tuple[Callable[[Any], float], Callable[..., Any]]] = {
    "__bool__": (lambda m: 2.0 if m.held else 1.0, lambda self: False),
    "__len__": (lambda m: 2.0 if m.held else 1.0, lambda self: 0),
    "__call__": (lambda m: 2.0 if callable(m.held) else 1.0, lambda self: 1),
    "__eq__": (lambda m: 2.0 if m.held == 3 else 1.0, lambda self, other: True),
    "__getattr__": (lambda m: getattr(m.held, "gone", 1.0), lambda self, name: 4.0),
    "__contains__": (lambda m: m.held.find(), lambda self, item: True),
}


class Finding(Thing):
    """What may be asked whether it contains something."""

    def find(self) -> float:
        return 2.0 if hasattr(type(self), "__contains__") and 3 in self else 1.0  # type: ignore[operator]


@pytest.mark.usefixtures("all_pieces")
@pytest.mark.parametrize("kind", [Scaling, Counting])
@pytest.mark.parametrize("method", SPECIAL)
def test_special_methods_that_are_made_later_are_called(method: str, kind: type[Scaling]) -> None:
    factor, made = SPECIAL[method]
    own = type("Own", (Finding,), {"__module__": __name__})
    module = kind(factor, own())
    plain = copy.copy(module)
    wrapped = ORTModule(module)
    x = torch.randn(4, 3)
    for change in (lambda: None, lambda: setattr(own, method, made), lambda: delattr(own, method)):
        change()
        for _ in range(2):
            torch.testing.assert_close(wrapped(x), plain(x))


def test_what_nobody_reads_may_come_to_a_class() -> None:
    own = type("Own", (Thing,), {"__module__": __name__})
    wrapped = ORTModule(Scaling(lambda m: 1.0, own()))
    for name in ("unread", "__slotnames__"):
        wrapped(torch.randn(4, 3))
        setattr(own, name, [])
    wrapped(torch.randn(4, 3))
    assert len(wrapped.report().captures) == 1


def test_names_of_classes_are_told_in_one_order() -> None:
    own = type("Own", (), {"b": 1, "a": 2, "unread": 3, "__len__": lambda self: 1})
    told = _core.comparisons([], {"a", "b"}, [(own, " names", "names")])
    assert [value for kind, value, _ in told if kind == "key"] == [
        "__dict__",
        "__len__",
        "__weakref__",
        "a",
        "b",
    ]
    # What is no class has none.
    guard = _core.ModuleGuard([], {"a"}, [({"a": 1}, " names", "names")])
    assert guard.holds()


def chain(length: int, kind: str, leaf: Any) -> Any:
    for _ in range(length):
        if kind == "lists":
            leaf = [leaf]
        elif kind == "tables":
            leaf = {"next": leaf}
        else:
            holder = Thing()
            holder.next = leaf  # type: ignore[attr-defined]
            leaf = holder
    return leaf


@pytest.mark.parametrize("kind", ["lists", "tables", "objects"])
@pytest.mark.parametrize("length", [20, 63, 64, 65, 200])
def test_what_lies_deep_is_followed(length: int, kind: str) -> None:
    leaf = {"factor": 2.0}

    def factor(module: Any) -> float:
        held = module.held
        while True:
            if isinstance(held, list):
                held = held[0]
            elif isinstance(held, Thing):
                held = held.next  # type: ignore[attr-defined]
            elif "next" in held:
                held = held["next"]
            else:
                return held["factor"]

    module = Scaling(factor, chain(length, kind, leaf))
    wrapped = ORTModule(module)
    x = torch.randn(4, 3)
    for value in (2.0, 3.0, 5.0):
        leaf["factor"] = value
        for _ in range(2):
            torch.testing.assert_close(wrapped(x), module.forward(x))
    captures = wrapped.report().captures
    assert not any(record.fallback for record in captures) and len(captures) <= 3


def test_a_graph_from_disk_is_not_taken_for_what_was_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    x = torch.randn(4, 3)
    module = Scaling(lambda m: getattr(m, "late", 1.0))
    for value in (None, None, 3.0, 3.0):
        if value is not None:
            Scaling.late = value  # type: ignore[attr-defined]
        wrapped = ORTModule(copy.deepcopy(module))
        wrapped(x).sum().backward()
        torch.testing.assert_close(wrapped(x), module.forward(x))
