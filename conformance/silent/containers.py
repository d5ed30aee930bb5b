# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Containers and objects of Python that forward reads or writes and that change between calls."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from conformance.silent.parts import Linear
from conformance.silent.program import Session, program


def _train(s: Session, net: nn.Module, change: Callable[[int], Any], steps: int = 5) -> None:
    """Train ``net``, with a change before each step but the first two."""
    model = s.wrap(net)
    for step in range(steps):
        if step > 1:
            change(step)
        s.train(model, s.leaf(3, 4) + step)


@program("pytorch#195029", 2026)
def deques_with_a_limit(s: Session) -> None:
    """Forward appends to deques of 0, 2 and 3 places and sums what is in them."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.none: collections.deque[float] = collections.deque(maxlen=0)
            self.two: collections.deque[torch.Tensor] = collections.deque(maxlen=2)
            self.three = collections.deque([0.5, 1.5, 2.5], maxlen=3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            self.none.append(1.0)
            self.two.append(y.detach().mean())
            self.three.appendleft(float(len(self.two)))
            local = collections.deque([1, 2, 3], maxlen=0)
            return y * sum(self.three) + sum(self.two) + len(self.none) + len(local)

    net = Net()
    model = s.wrap(net)
    for step in range(5):
        s.train(model, s.leaf(3, 4) + step)
        s.see("deques", [net.none, net.two, net.three])


@program()
def deque_rotated_outside(s: Session) -> None:
    """The caller rotates a deque of scales that forward reads."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.scales = collections.deque([1.0, 2.0, 3.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scales[0] + self.scales[-1]

    net = Net()
    _train(s, net, lambda step: net.scales.rotate(1))


@program()
def set_changes(s: Session) -> None:
    """Which of three layers run is a set of names that changes between calls."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
            self.skipped: set[str] = set()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name, layer in self.layers.items():
                if name not in self.skipped:
                    x = layer(x).tanh()
            return x

    net = Net()
    _train(s, net, lambda step: net.skipped.symmetric_difference_update("abc"[: step - 1]))


@program()
def defaultdict_and_counter_change(s: Session) -> None:
    """Forward looks keys up in a defaultdict, which adds them, and counts in a Counter."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.scales: collections.defaultdict[str, float] = collections.defaultdict(lambda: 2.0)
            self.counts: collections.Counter[str] = collections.Counter()
            self.key = "a"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.counts[self.key] += 1
            return self.linear(x) * self.scales[self.key] * self.counts[self.key]

    net = Net()
    model = s.wrap(net)
    for step, key in enumerate("aabab"):
        net.key = key
        if step == 3:
            net.scales["a"] = -1.0
        s.train(model, s.leaf(3, 4))
        s.see("state", [net.scales, net.counts])


@program()
def dict_subclass_changes(s: Session) -> None:
    """A dict with attribute access holds the configuration; a value and an attribute change."""

    class Config(dict):  # type: ignore[type-arg]
        doubled = False

        def __getattr__(self, name: str) -> Any:
            value = self[name]
            return value * 2 if self.doubled and name == "scale" else value

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config(scale=1.0, layers=Config(repeat=1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.config.layers.repeat):
                x = self.linear(x) * self.config.scale
            return x

    net = Net()

    def change(step: int) -> None:
        if step == 2:
            net.config["scale"] = 0.5
        elif step == 3:
            net.config["layers"]["repeat"] = 2
        else:
            Config.doubled = True

    _train(s, net, change)


@program()
def array_changes(s: Session) -> None:
    """A NumPy array of scales is written in place between calls; forward makes a tensor of it."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.scales = np.ones(4, dtype=np.float32)
            self.shared = torch.from_numpy(self.scales)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            copied = torch.tensor(self.scales.copy())
            return self.linear(x) * copied + self.shared + float(self.scales[0])

    net = Net()

    def change(step: int) -> None:
        net.scales[step % 4] += step

    _train(s, net, change)


@program()
def callable_object_changes(s: Session) -> None:
    """An activation is an object with a slope that changes, then another object."""

    class Leaky:
        def __init__(self, slope: float) -> None:
            self.slope = slope

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 0, x, x * self.slope)

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.act: Callable[[torch.Tensor], torch.Tensor] = Leaky(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.linear(x))

    net = Net()

    def change(step: int) -> None:
        if step == 2:
            net.act.slope = 0.9  # type: ignore[attr-defined]
        elif step == 3:
            net.act = Leaky(-1.0)
        else:
            net.act = torch.sigmoid

    _train(s, net, change)


@program()
def iterator_attribute(s: Session) -> None:
    """Forward takes the next of a cycle of scales; the caller takes one too."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.scales = itertools.cycle((1.0, 2.0, 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * next(self.scales)

    net = Net()
    _train(s, net, lambda step: next(net.scales), steps=6)
    s.see("next", next(net.scales))


@program("pytorch#177196", 2026)
def count_from_outside(s: Session) -> None:
    """Forward advances an itertools.count, which the caller reads."""
    counter = itertools.count(1)

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * next(counter)

    model = s.wrap(Net())
    for step in range(5):
        s.train(model, s.leaf(3, 4))
        if step == 2:
            s.see("counter", next(counter))
    s.see("counter", next(counter))


@program("pytorch#196211", 2026)
def reversed_iterator_partly_consumed(s: Session) -> None:
    """Forward takes one from a reversed list, asks iter() of it, and goes through the rest."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [1.0, 2.0, 3.0, 4.0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            backwards = reversed(self.scales)
            y = self.linear(x) * next(backwards)
            for scale in iter(backwards):
                y = y + scale * x
            return y + sum(backwards)

    net = Net()
    _train(s, net, lambda step: net.scales.append(float(step)))


@program("pytorch#196212", 2026)
def reversed_iterator_as_argument(s: Session) -> None:
    """The caller passes a reversed iterator, of which forward takes two."""

    class Net(Linear):
        def forward(self, x: torch.Tensor, steps: Iterator[int]) -> torch.Tensor:
            same = iter(steps)
            first, second = next(same), next(steps)
            return self.linear(x) * first + second

    model = s.wrap(Net())
    for values in ([3, 5, 7], [3, 5, 7], [7, 5, 3]):
        steps = reversed(values)
        s.train(model, s.leaf(3, 4), steps)
        s.see("left", list(steps))


@program("pytorch#152262", 2025)
def exhausted_iterator(s: Session) -> None:
    """Forward exhausts iterators and asks them again."""

    class Net(Linear):
        def forward(self, x: torch.Tensor, numbers: list[int]) -> torch.Tensor:
            forwards, backwards = iter(numbers), reversed(numbers)
            y = self.linear(x) * sum(forwards) + len(list(backwards))
            try:
                next(backwards)
            except StopIteration:
                y = y.neg()
            return y + next(forwards, 100)

    model = s.wrap(Net())
    for numbers in ([1, 2, 3], [1, 2, 3], [4, 5, 6]):
        s.train(model, s.leaf(3, 4), numbers)


@program("pytorch#175855", 2026)
def list_grows_under_its_loop(s: Session) -> None:
    """Forward appends to a list while a generator goes through it."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [self.linear(x)]

            def walk() -> Iterator[torch.Tensor]:
                for part in parts:
                    if len(parts) < 4:
                        parts.append(part.tanh() + 1)
                    yield part

            return torch.stack(list(walk())).sum(0)

    model = s.wrap(Net())
    for step in range(3):
        s.train(model, s.leaf(3, 4) + step)


@program("pytorch#198190", 2026)
def generator_returned(s: Session) -> None:
    """Forward returns a generator, which the caller runs, and whose return value he takes."""

    class Net(Linear):
        def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            y = self.linear(x)
            yield y
            yield y.tanh()
            return "done"  # type: ignore[return-value]

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            return self.parts(x)

    model = s.wrap(Net())
    for _ in range(3):
        parts = model(s.leaf(3, 4))
        with s.may_raise("generator"):
            for number in range(3):
                try:
                    s.see(f"part {number}", next(parts))
                except StopIteration as stop:
                    s.see("returned", stop.value)


@program("pytorch#146348", 2025)
def generator_as_argument(s: Session) -> None:
    """The caller passes a generator of tensors, which forward consumes in part."""

    class Net(Linear):
        def forward(self, x: torch.Tensor, more: Iterator[torch.Tensor]) -> torch.Tensor:
            return self.linear(x) + next(more) * next(more)

    model = s.wrap(Net())
    for step in range(3):
        more = (s.values(4) * (i + step) for i in range(1, 4))
        s.train(model, s.leaf(3, 4), more)
        s.see("left", list(more))
