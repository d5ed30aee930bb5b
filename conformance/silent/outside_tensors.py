# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Tensors that forward reads and that are no parameters or buffers: lists, closures, globals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from conformance.silent.parts import Linear
from conformance.silent.program import Session, program, twin

_SCALE = torch.ones(4)
_TABLE: dict[str, torch.Tensor] = {}


@program()
def teacher_in_a_list(s: Session) -> None:
    """A teacher hidden in a plain list follows the student by an exponential mean."""

    class Student(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [twin(self.linear).requires_grad_(False)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                aim = self.hidden[0](x)
            return (self.linear(x) - aim).square().sum(-1)

    net = Student()
    with torch.no_grad():
        net.linear.weight.mul_(1.5)
    model = s.wrap(net)
    for step in range(5):
        s.train(model, s.leaf(3, 4) + step)
        with torch.no_grad():
            for mean, now in zip(net.hidden[0].parameters(), net.linear.parameters(), strict=True):
                if step % 2:
                    mean.mul_(0.5).add_(now, alpha=0.5)
                else:
                    mean.data = mean.data * 0.5 + now.data * 0.5
            net.linear.weight.add_(0.1)


@program()
def tensor_in_a_closure(s: Session) -> None:
    """Forward multiplies by a tensor of the enclosing function, changed in place and replaced."""
    scale = torch.ones(4)

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * scale

    model = s.wrap(Net())
    s.train(model, s.leaf(3, 4))
    s.train(model, s.leaf(3, 4))
    scale.mul_(3)
    s.train(model, s.leaf(3, 4))
    scale.data = torch.full((4,), -1.0)
    s.train(model, s.leaf(3, 4))
    scale = torch.full((4,), 0.25)
    s.train(model, s.leaf(3, 4))
    scale = torch.full((4,), 2, dtype=torch.int64)
    s.train(model, s.leaf(3, 4))


@program("pytorch#191821", 2026)
def tensor_in_a_global(s: Session) -> None:
    """Forward reads a tensor of the module's globals, which is replaced, then changed through .data."""
    global _SCALE

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * _SCALE

    model = s.wrap(Net())
    _SCALE = torch.ones(4)
    for value in (None, None, 2.0, 3.0):
        if value is not None:
            _SCALE = torch.full((4,), value)
        s.train(model, s.leaf(3, 4))
    _SCALE.data.mul_(0.5)
    s.train(model, s.leaf(3, 4))
    _SCALE.requires_grad_()
    s.train(model, s.leaf(3, 4))
    s.see("gradient of the global", _SCALE.grad)


@program("pytorch#191821", 2026)
def global_written_in_a_loop(s: Session) -> None:
    """Forward writes a global that a function reads, twice in one call."""

    def read() -> torch.Tensor:
        return _TABLE["hidden"] + 1

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(x)
            for _ in range(2):
                _TABLE["hidden"] = hidden * 2
                hidden = read()
            return hidden

    model = s.wrap(Net())
    for step in range(4):
        s.train(model, s.leaf(3, 4) + step)
        s.see("left behind", _TABLE["hidden"])
    _TABLE.clear()


@program("pytorch#115774", 2023)
def cache_attribute_replaced(s: Session) -> None:
    """A plain tensor attribute is written at a position by forward and replaced by the caller."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(s.values(2))
            self.cache = torch.zeros(2)

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            self.cache[at] = x.detach()
            return self.cache * self.weight

    net = Net()
    model = s.wrap(net)
    for step in range(5):
        s.train(model, torch.tensor([step + 1.0]), torch.tensor([step % 2]))
        s.see("cache", net.cache)
        if step == 2:
            net.cache = torch.zeros(2)


@functools.lru_cache
def _positions(length: int) -> torch.Tensor:
    return torch.arange(length).unsqueeze(-1) / length


@program()
def cached_table(s: Session) -> None:
    """Forward asks an lru_cache for a table; the cached tensor is changed, then the cache emptied."""
    _positions.cache_clear()

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x + _positions(x.shape[0]))

    model = s.wrap(Net())
    for length in (3, 3, 5, 3):
        s.train(model, s.leaf(length, 4))
    _positions(3).add_(1)
    s.train(model, s.leaf(3, 4))
    _positions.cache_clear()
    s.train(model, s.leaf(3, 4))
    s.see("cache", list(_positions.cache_info())[2:])


@program()
def parameter_data_replaced(s: Session) -> None:
    """An optimizer of old writes parameters through .data, in place and by assignment."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    net = Net()
    model = s.wrap(net)
    for step in range(5):
        s.train(model, s.leaf(3, 4))
        weight = net.linear.weight
        if step % 2:
            weight.data = weight.data + 0.1
        else:
            weight.data.sub_(0.05)


@program()
def tensor_of_an_unregistered_module(s: Session) -> None:
    """Forward uses a module held by a function, whose buffer it updates and whose weight learns."""
    norm = nn.BatchNorm1d(4)

    def normalize(x: torch.Tensor) -> torch.Tensor:
        return norm(x)

    class Net(Linear):
        def __init__(self, apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.apply_norm = apply

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.apply_norm(self.linear(x))

    model = s.wrap(Net(normalize))
    for step in range(4):
        s.train(model, s.leaf(6, 4) * (step + 1))
        s.see("outside", [norm.running_mean, norm.num_batches_tracked, norm.weight.grad])
        with torch.no_grad():
            norm.weight.mul_(1.5)
        norm.zero_grad()
    norm.eval()
    s.train(model, s.leaf(6, 4))
    s.see("outside", [norm.running_mean, norm.num_batches_tracked])


@program()
def tensors_swapped_between_names(s: Session) -> None:
    """Two tensors of one shape change places in a dict: same objects, same shapes, other meaning."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[str, Any] = {"up": torch.ones(4), "down": torch.full((4,), 2.0)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) + self.tables["up"]) / self.tables["down"]

    net = Net()
    model = s.wrap(net)
    for step in range(4):
        s.train(model, s.leaf(3, 4))
        if step:
            tables = net.tables
            tables["up"], tables["down"] = tables["down"], tables["up"]
