# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Attributes of modules, classes and objects that forward writes, or that change between calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from conformance.silent.program import Session, program


@program("pytorch#196173", 2026)
def object_chosen_by_identity(s: Session) -> None:
    """Which of two equal mutable objects forward takes decides the branch, and it is changed."""

    class Gate:
        def __init__(self) -> None:
            self.uses = 0

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Gate)

        __hash__ = None  # type: ignore[assignment]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.first, self.second = Gate(), Gate()
            self.active = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.active.uses += 1
            y = self.linear(x)
            return y * 2 if self.active is self.first else y.neg()

    net = Net()
    model = s.wrap(net)
    for step in range(5):
        net.active = net.second if step in (2, 4) else net.first
        s.train(model, s.leaf(3, 4))
        s.see("uses", [net.first.uses, net.second.uses])


@program("pytorch#176599", 2026)
def property_with_logic(s: Session) -> None:
    """A property's setter clips and counts, its getter scales; forward uses both."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.level, self.writes = 0.5, 0

        @property
        def gain(self) -> float:
            return self.level * 10

        @gain.setter
        def gain(self, value: float) -> None:
            self.writes += 1
            self.level = min(value, 2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x) * self.gain
            self.gain = self.level + 0.5
            return y

    net = Net()
    model = s.wrap(net)
    for _ in range(5):
        s.train(model, s.leaf(3, 4))
        s.see("state", [net.level, net.writes])


@program("pytorch#172000", 2026)
def setter_of_an_object_made_in_forward(s: Session) -> None:
    """A property's setter on an object that forward makes writes into an object inside it."""

    class Inner:
        def __init__(self) -> None:
            self.scale = 1.0

    class Outer:
        def __init__(self) -> None:
            self.inner = Inner()

        @property
        def scale(self) -> float:
            return self.inner.scale

        @scale.setter
        def scale(self, value: float) -> None:
            self.inner.scale = value * 2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(s.values(4))
            self.value = 1.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outer = Outer()
            outer.scale = self.value
            return x * self.weight * outer.scale

    net = Net()
    model = s.wrap(net)
    for value in (1.5, 1.5, 3.0):
        net.value = value
        s.train(model, s.leaf(3, 4))


class Tally(nn.Module):
    """Keeps what it has seen in a list of its class."""

    seen: list[torch.Tensor] = []
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        Tally.seen.append(y.detach().sum())
        return y * len(Tally.seen)


@program("pytorch#169253", 2025)
def list_of_the_class_grows(s: Session) -> None:
    """Forward appends to a list that is an attribute of the class, not of the instance."""
    Tally.seen = []
    model = s.wrap(Tally())
    for step in range(4):
        s.train(model, s.leaf(3, 4) + step)
        s.see("seen", Tally.seen)


class Settings:
    """Settings that many modules read from one class."""

    factor = 1.0
    clip: float | None = None


@program("pytorch#176851", 2026)
def attribute_of_another_class_changes(s: Session) -> None:
    """Forward reads a number from a class that nobody hands to it; it changes between calls."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x) * Settings.factor
            return y if Settings.clip is None else y.clamp(-Settings.clip, Settings.clip)

    model = s.wrap(Net())
    for factor, clip in ((1.0, None), (1.0, None), (10.0, None), (10.0, 0.2), (1.0, None)):
        Settings.factor, Settings.clip = factor, clip
        s.train(model, s.leaf(3, 4))
    Settings.factor, Settings.clip = 1.0, None


@program()
def class_attribute_set_through_the_wrapper(s: Session) -> None:
    """An attribute of the module's class is shadowed through what wraps the module."""

    class Net(nn.Module):
        power = 1

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) ** self.power

    net = Net()
    model: Any = s.wrap(net)
    for power in (None, None, 2, 3):
        if power is not None:
            model.power = power
        s.see("power", model.power)
        s.train(model, s.leaf(3, 4))
    Net.power = 5
    s.train(model, s.leaf(3, 4))
    del Net.power
    s.train(model, s.leaf(3, 4))


@program()
def class_attribute_changes(s: Session) -> None:
    """An attribute of the module's own class and one of a base class change between calls."""

    class Base(nn.Module):
        offset = 0.0

    class Net(Base):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale + self.offset

    model = s.wrap(Net())
    for scale, offset in ((1.0, 0.0), (1.0, 0.0), (2.0, 0.0), (2.0, 1.0)):
        Net.scale, Base.offset = scale, offset
        s.train(model, s.leaf(3, 4))


@program("pytorch#165385", 2025)
def refused_attribute_is_caught(s: Session) -> None:
    """Forward tries to set an attribute that a class with slots refuses, and goes on without."""

    class Slots:
        __slots__ = ("kept",)

        def __init__(self) -> None:
            self.kept = 1.0

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.notes = Slots()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                self.notes.other = 3.0  # type: ignore[attr-defined]
            except AttributeError:
                self.notes.kept += 1.0
            return self.linear(x) * self.notes.kept

    net = Net()
    model = s.wrap(net)
    for _ in range(4):
        s.train(model, s.leaf(3, 4))
        s.see("kept", net.notes.kept)


@program()
def tensor_attribute_of_the_last_call(s: Session) -> None:
    """Forward keeps a tensor in an attribute; the next call reads it, the caller too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if self.last is not None:
                y = y + self.last
            self.last = y.detach().mean(0)
            return y

    net = Net()
    model = s.wrap(net)
    for step in range(5):
        s.train(model, s.leaf(3, 4) * (step + 1))
        s.see("last", net.last)
    net.last = None
    s.train(model, s.leaf(3, 4))


@program()
def differentiable_attribute(s: Session) -> None:
    """Forward leaves an auxiliary loss in an attribute, from which the caller runs backward too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.penalty = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            self.penalty = y.square().mean()
            return y.tanh()

    net = Net()
    model = s.wrap(net)
    for _ in range(4):
        x = s.leaf(3, 4)
        y = model(x)
        s.see("penalty", net.penalty)
        (y.sum() + 0.5 * net.penalty).backward()
        s.gradients(model, x)


@program()
def list_and_counter_grow(s: Session) -> None:
    """Forward appends to a list, counts in a dict and counts in an object."""

    @dataclasses.dataclass
    class Statistics:
        calls: int = 0
        rows: int = 0

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norms: list[torch.Tensor] = []
            self.counts = {"calls": 0}
            self.statistics = Statistics()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            self.norms.append(y.detach().norm())
            self.counts["calls"] += 1
            self.statistics.calls += 1
            self.statistics.rows += x.shape[0]
            return y

    net = Net()
    model = s.wrap(net)
    for rows in (3, 3, 5, 3):
        s.train(model, s.leaf(rows, 4))
        s.see("state", [net.norms, net.counts, net.statistics])


@program()
def slots_object_changes(s: Session) -> None:
    """A dataclass with slots holds hyperparameters that change between calls."""

    @dataclasses.dataclass(slots=True)
    class Hyper:
        temperature: float
        hard: bool = False

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.hyper = Hyper(1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x) / self.hyper.temperature
            return y.relu() if self.hyper.hard else y.softmax(-1)

    net = Net()
    model = s.wrap(net)
    for temperature, hard in ((1.0, False), (1.0, False), (0.5, False), (0.5, True), (1.0, False)):
        net.hyper.temperature, net.hyper.hard = temperature, hard
        s.train(model, s.leaf(3, 4))


@program("pytorch#117758", 2024)
def submodule_and_method_replaced(s: Session) -> None:
    """Between calls a submodule is exchanged, a method replaced, a parameter frozen."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.act: nn.Module = nn.ReLU()

        def scale(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale(self.act(self.linear(x)))

    net = Net()
    model = s.wrap(net)
    x = s.leaf(3, 4)
    for _ in range(2):
        s.train(model, x)
    net.act = nn.Tanh()
    s.train(model, x)
    net.scale = lambda x: x * 3  # type: ignore[method-assign]
    s.train(model, x)
    net.linear.weight.requires_grad_(False)
    s.train(model, x)
    net.linear = nn.Linear(4, 4)
    s.train(model, x)
