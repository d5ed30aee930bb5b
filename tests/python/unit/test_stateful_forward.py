# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Forwards that do more than compute outputs from their inputs, each against PyTorch, call after call."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.reachable_state import ReachableState

total = 0
seen: list[int] = []


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.prepare()

    def prepare(self) -> None:
        """Make what the forward changes."""

    def kept(self) -> Any:
        """Return what it has changed."""
        return None


class AuxiliaryLoss(Base):
    def prepare(self) -> None:
        self.aux = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.aux = y.square().mean()
        return y

    def kept(self) -> Any:
        return self.aux


class LossFromNone(AuxiliaryLoss):
    def prepare(self) -> None:
        self.aux = None


class Losses(Base):
    def prepare(self) -> None:
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.losses.append(y.mean())
        return y + len(self.losses)

    def kept(self) -> Any:
        return list(self.losses)


class Recurrent(Base):
    def prepare(self) -> None:
        self.h = torch.zeros(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = torch.tanh(self.layer(x) + self.h.detach())
        return self.h

    def kept(self) -> Any:
        return self.h


class InDictionary(Base):
    def prepare(self) -> None:
        self.state = {"calls": 0, "inner": {"sum": 0.0}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state["calls"] += 1
        self.state["inner"]["sum"] += 0.5
        return self.layer(x) * self.state["calls"] + self.state["inner"]["sum"]

    def kept(self) -> Any:
        return self.state


class Clock:
    def __init__(self) -> None:
        self.time = 0


class InObject(Base):
    def prepare(self) -> None:
        self.clock = Clock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.time += 1
        return self.layer(x) * self.clock.time

    def kept(self) -> Any:
        return self.clock.time


@dataclasses.dataclass
class Slotted:
    __slots__ = ("count",)
    count: int


class InSlots(Base):
    def prepare(self) -> None:
        self.slotted = Slotted(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.slotted.count += 1
        return self.layer(x) * self.slotted.count

    def kept(self) -> Any:
        return self.slotted.count


class InClosure(Base):
    def prepare(self) -> None:
        count = 0

        def tick() -> int:
            nonlocal count
            count += 1
            return count

        # A copy of the module shares a function with it.
        self.ticks = [tick]

    def __deepcopy__(self, memo: Any) -> InClosure:
        other = InClosure()
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.ticks[0]()


class InGlobal(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global total
        total += 1
        seen.append(total)
        return self.layer(x) * total + len(seen)

    def kept(self) -> Any:
        global total
        counted, total = total, 0
        listed = list(seen)
        seen.clear()
        return counted, listed


class InClass(Base):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return self.layer(x) * InClass.calls

    def kept(self) -> Any:
        calls, InClass.calls = InClass.calls, 0
        return calls


class InContainers(Base):
    def prepare(self) -> None:
        self.names: set[str] = set()
        self.recent: collections.deque[int] = collections.deque(maxlen=2)
        self.counts: collections.Counter[str] = collections.Counter()
        self.lists: dict[str, list[int]] = collections.defaultdict(list)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = len(self.lists["calls"])
        self.names.add(f"name {n}")
        self.recent.append(n)
        self.counts["calls"] += n
        self.lists["calls"].append(n)
        return self.layer(x) * len(self.names) + sum(self.recent) + self.counts["calls"]

    def kept(self) -> Any:
        return sorted(self.names), list(self.recent), dict(self.counts), dict(self.lists)


class InArray(Base):
    def prepare(self) -> None:
        self.array = np.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.array[0] += 1
        return self.layer(x) * float(self.array[0])

    def kept(self) -> Any:
        return self.array.tolist()


class Iterates(Base):
    def prepare(self) -> None:
        self.values = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * next(self.values)


class FillsBuffer(Base):
    def prepare(self) -> None:
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = x.mean(0)
        return self.layer(x - self.mean)

    def kept(self) -> Any:
        return self.mean


class NewBuffer(Base):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layer(x - self.mean)

    def kept(self) -> Any:
        return self.mean


class PythonDraws(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y if random.random() < 0.5 else y * random.choice([2, 3])


class NumPyDraws(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(np.random.rand()) + np.random.randint(5)


class OwnGenerators(Base):
    def prepare(self) -> None:
        self.python = random.Random(3)
        self.numpy = np.random.default_rng(3)
        self.earlier = np.random.RandomState(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.python.random() + float(self.numpy.random()) + float(self.earlier.rand())
        return self.layer(x) * scale


class Cached(Base):
    def prepare(self) -> None:
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(float(x.shape[1]))
        return self.layer(x) + self.tables[x.shape[1]]

    def kept(self) -> Any:
        return self.tables


class Property(Base):
    @functools.cached_property
    def scale(self) -> float:
        return 2.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class Toggles(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.training = not self.training
        return y if self.training else 2 * y

    def kept(self) -> Any:
        return self.training


def classes(base: type) -> list[type]:
    return [c for sub in base.__subclasses__() for c in (sub, *classes(sub))]


def follow(model: Base, steps: int = 5) -> list[Any]:
    """Train, and return what can be seen of it."""
    wrapped = model.module if isinstance(model, ORTModule) else model
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen_here: list[Any] = []
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    for _ in range(steps):
        y = model(torch.randn(3, 4))
        loss = y.square().mean()
        aux = getattr(wrapped, "aux", None)
        if aux is not None and aux.requires_grad:
            loss = loss + aux
        loss.backward()
        seen_here.append(
            (loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None])
        )
        optimizer.step()
        optimizer.zero_grad()
    seen_here.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
    return [*seen_here, copy.copy(wrapped.kept())]


@pytest.mark.parametrize("kind", classes(Base), ids=lambda kind: kind.__name__)
def test_follows_pytorch(kind: type[Base]) -> None:
    torch.manual_seed(1)
    plain = kind()
    ours = ORTModule(copy.deepcopy(plain))
    expected = follow(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = follow(ours)
    *_, state = found
    *_, expected_state = expected
    torch.testing.assert_close(found[:-1], expected[:-1], rtol=1e-5, atol=1e-6)
    same_state(state, expected_state)


def same_state(found: Any, expected: Any) -> None:
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            same_state(a, b)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        same_state(list(found.values()), list(expected.values()))
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert found.requires_grad == expected.requires_grad
    else:
        assert found == expected


@pytest.mark.parametrize("kind", [PythonDraws, NumPyDraws, OwnGenerators])
def test_draws_are_named(kind: type[Base]) -> None:
    with pytest.warns(RuntimeWarning, match=r"its forward draws.* only once"):
        ORTModule(kind())(torch.randn(3, 4))


def test_a_forward_that_draws_in_training_alone_is_whole_in_evaluation() -> None:
    class LayerDrop(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.training and random.random() < 0.5 else self.layer(x)

    ours = ORTModule(LayerDrop())
    with pytest.warns(RuntimeWarning, match="draws Python's random numbers"):
        ours(torch.randn(3, 4))
    ours.eval()
    ours(torch.randn(3, 4))
    assert ours.report().captures[-1].native_nodes > 0


def test_arguments_are_changed_once_per_call() -> None:
    class Collects(Base):
        def forward(self, x: torch.Tensor, out: dict[str, Any], tensors: list[Any]) -> torch.Tensor:
            y = self.layer(x)
            out["calls"] = out.get("calls", 0) + 1
            tensors.append(y.mean())
            return y

    plain = Collects()
    ours = ORTModule(copy.deepcopy(plain))
    results = []
    for model in (plain, ours):
        out, tensors = {}, []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for step in range(4):
                model(torch.full((3, 4), float(step)), out, tensors)
        results.append((out, tensors))
    torch.testing.assert_close(results[1], results[0])


def test_a_trace_that_fails_changes_nothing() -> None:
    class Fails(Losses):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y if y.sum() > -1e9 else x  # no graph can branch on it

    plain = Fails()
    ours = ORTModule(copy.deepcopy(plain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(3):
            x = torch.randn(3, 4)
            torch.testing.assert_close(ours(x), plain(x))
    assert len(ours.module.losses) == 3


# --- what is looked at


def changes_of(module: nn.Module, change: Callable[[], None]) -> tuple[list[str], list[str]]:
    state = ReachableState(module, ())
    change()
    changes = state.restore()
    again = state.restore()
    assert not again.changed and not again.made and not again.drawn
    return changes.changed, [*changes.made, *(each.name for each in changes.made_plain)]


def test_everything_reached_is_set_back_and_named() -> None:
    model = InContainers()
    model.table = collections.OrderedDict(a=1, b=2)
    model.partial = functools.partial(print, Clock())
    model.pair = (1, [2])
    assert changes_of(model, lambda: model.names.add("x")) == (["names"], [])
    assert model.names == set()
    assert changes_of(model, lambda: model.table.move_to_end("a")) == ([], [])
    assert list(model.table) == ["a", "b"]
    assert changes_of(model, lambda: model.table.update(c=3)) == ([], ["table.c"])
    assert changes_of(model, lambda: model.table.pop("a")) == (["table.a"], [])
    assert changes_of(model, lambda: setattr(model.partial.args[0], "time", 4)) == (
        ["partial.time"],
        [],
    )
    assert changes_of(model, lambda: model.pair[1].append(3)) == (["pair"], [])
    assert changes_of(model, lambda: setattr(model, "other", 3)) == ([], ["other"])
    assert not hasattr(model, "other")
    assert changes_of(model, lambda: setattr(model.layer, "bias", None)) == (["layer.bias"], [])
    assert changes_of(model, lambda: setattr(InContainers, "more", 3)) == (
        [],
        ["InContainers.more"],
    )
    assert not hasattr(InContainers, "more")
    assert changes_of(model, lambda: seen.append(1)) == ([], [])  # its forward does not name it
    seen.clear()
    assert changes_of(InGlobal(), lambda: seen.append(1)) == ([f"{__name__}.seen"], [])


def test_values_that_are_equal_have_not_changed() -> None:
    model = Base()
    model.nan, model.name, model.bound = float("nan"), "a" * 50, model.kept

    def same() -> None:
        model.nan, model.name, model.bound = float("nan"), "".join(["a"] * 50), model.kept

    assert changes_of(model, same) == ([], [])
    assert changes_of(model, lambda: setattr(model, "nan", 1.0)) == (["nan"], [])


# --- changes between calls, from outside

factor = 2.0
table = {"factor": [2.0]}


class Reads(Base):
    """Reads one thing, which a test changes."""

    shared = 2.0

    def prepare(self) -> None:
        self.value: Any = None
        self.read: Callable[[Reads], float] = lambda m: 1.0
        self.unread = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.read(self)


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean()


class Callable_:
    def __init__(self) -> None:
        self.rate = 2.0

    def __call__(self) -> float:
        return self.rate


class Mapping_(dict):
    def __init__(self) -> None:
        super().__init__(a=2.0)
        self.more = 1.0


def closure() -> tuple[Callable[[], float], Callable[[float], None]]:
    held = 2.0

    def read() -> float:
        return held

    def write(value: float) -> None:
        nonlocal held
        held = value

    return read, write


def change_global(value: float) -> None:
    global factor
    factor = value
    table["factor"][0] = value


def change_class(value: float) -> None:
    Reads.shared = value


# What is read: how it is made, how it is read, how it is changed.
OUTSIDE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "set": (lambda: {1}, lambda m: len(m.value), lambda v: v.add(2)),
    "deque": (lambda: collections.deque([2.0]), lambda m: m.value[0], lambda v: v.appendleft(3.0)),
    "defaultdict": (
        lambda: collections.defaultdict(float, a=2.0),
        lambda m: m.value["a"],
        lambda v: v.update(a=3.0),
    ),
    "Counter": (
        lambda: collections.Counter(a=2),
        lambda m: m.value["a"],
        lambda v: v.update(a=3),
    ),
    "slots": (lambda: Slotted(2), lambda m: m.value.count, lambda v: setattr(v, "count", 3)),
    "dict subclass": (Mapping_, lambda m: m.value["a"], lambda v: v.update(a=3.0)),
    "its attribute": (Mapping_, lambda m: m.value.more, lambda v: setattr(v, "more", 3.0)),
    "array": (lambda: np.ones(2), lambda m: float(m.value[0]), lambda v: v.__setitem__(0, 3.0)),
    "callable object": (Callable_, lambda m: m.value(), lambda v: setattr(v, "rate", 3.0)),
    "closure": (closure, lambda m: m.value[0](), lambda v: v[1](3.0)),
    "partial": (
        lambda: functools.partial(lambda a: a[0], [2.0]),
        lambda m: m.value(),
        lambda v: v.args[0].__setitem__(0, 3.0),
    ),
    "bound method": (
        lambda: Callable_().__call__,
        lambda m: m.value(),
        lambda v: setattr(v.__self__, "rate", 3.0),
    ),
    "deep": (
        lambda: [{"a": ([{"b": [[{"c": [2.0]}]]}],)}],
        lambda m: m.value[0]["a"][0][0]["b"][0][0]["c"][0],
        lambda v: v[0]["a"][0][0]["b"][0][0]["c"].__setitem__(0, 3.0),
    ),
    "module in a list": (
        lambda: [Teacher()],
        lambda m: m.value[0](torch.ones(4)),
        lambda v: v[0].layer.weight.requires_grad_(False).mul_(2),
    ),
    "tensor": (lambda: torch.ones(1), lambda m: m.value, lambda v: v.add_(1)),
    "global": (lambda: None, lambda m: factor, lambda v: change_global(3.0)),
    "global container": (lambda: None, lambda m: table["factor"][0], lambda v: change_global(3.0)),
    "class": (lambda: None, lambda m: m.shared, lambda v: change_class(3.0)),
    "attribute by a computed name": (
        lambda: None,
        lambda m: float(getattr(m, "unr" + "ead")),
        lambda v: None,
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_was_read_may_change_between_calls(name: str) -> None:
    make, read, change = OUTSIDE[name]
    results = []
    for wrap in (lambda m: m, ORTModule):
        change_global(2.0)
        change_class(2.0)
        torch.manual_seed(2)
        model = Reads()
        model.read = read
        model.value = make()
        called = wrap(model)
        x = torch.randn(3, 4)
        found = [called(x).detach().clone()]
        change(model.value)
        model.unread += 1
        found += [called(x).detach().clone(), called(x).detach().clone()]
        results.append(found)
    torch.testing.assert_close(results[1], results[0])


def test_what_no_forward_reads_may_change() -> None:
    ours = ORTModule(Reads())
    x = torch.randn(3, 4)
    for step in range(20):
        ours.unread = step
        ours.metric = {"step": [step], "other": object()}
        ours(x)
    assert len(ours.report().captures) == 1


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.size = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if min(x.shape[1:]) <= self.size:
            self.size = min(x.shape[1:])
        return self.linear(x.reshape(-1, self.size, 4)).sin()


def test_a_size_that_is_the_number_there_was_is_no_change() -> None:
    plain = Window()
    ours = ORTModule(copy.deepcopy(plain))
    for rows in (2, 3):
        x = torch.ones(rows, 8, 4)
        torch.testing.assert_close(ours(x), plain(x))
    assert not any(record.fallback for record in ours.report().captures)
