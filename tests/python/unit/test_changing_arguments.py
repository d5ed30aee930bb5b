# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers among the arguments and attributes that change from call to call."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule


def agree(plain: nn.Module, ours: nn.Module, *args: Any, **kwargs: Any) -> None:
    seen = []
    for m in (plain, ours):
        m.zero_grad()
        torch.manual_seed(5)
        result = m(*args, **kwargs)
        result.square().sum().backward()
        seen.append([result.detach(), [p.grad for p in m.parameters()]])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-5)


def captures(ours: ORTModule) -> int:
    return sum(not r.fallback for r in ours.report().captures)


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)

    def embed(self, t: float) -> torch.Tensor:
        return torch.sin(t * torch.arange(4) / 10) + torch.tensor([t]) * 0.01

    def forward(self, x: torch.Tensor, t: float, note: str = "") -> torch.Tensor:
        return self.fc(x) * 0.99**t + self.embed(t) + x * (t / 10)


def pair(model: nn.Module) -> tuple[nn.Module, ORTModule]:
    return model, ORTModule(copy.deepcopy(model))


X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


def test_an_int_costs_two_captures() -> None:
    plain, ours = pair(Timed())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for t in (981, 961, 3, 500, 17, 2, 999, 12, 13, 14, 15, 16):
            agree(plain, ours, X, t)
    assert captures(ours) == 2
    agree(plain, ours, X[:2], t=7)
    assert captures(ours) == 2
    for t in (0, 1, -4):  # values that a size has not, or has for itself
        agree(plain, ours, X, t)
    assert captures(ours) == 5


def test_a_float_costs_two_captures() -> None:
    plain, ours = pair(Timed())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for step in range(15):
            agree(plain, ours, X, 0.5 + step / 7)
        agree(plain, ours, X, -2.5)
    assert captures(ours) == 2
    for t in (math.inf, math.nan):
        assert torch.equal(ours(X, t).isnan(), plain(X, t).isnan())


def test_other_arguments_stay_as_they_are() -> None:
    plain, ours = pair(Timed())
    for t in (5, 6):
        agree(plain, ours, X, t, note="a")
    agree(plain, ours, X, 7, note="b")
    agree(plain, ours, X, 8, note="b")
    assert captures(ours) == 3


def test_branches_on_the_number_have_a_graph_each() -> None:
    class Branch(Timed):
        def forward(self, x: torch.Tensor, t: int) -> torch.Tensor:
            return self.fc(x) * t if t < 10 else self.fc(x) + t

    plain, ours = pair(Branch())
    for t in (3, 4, 5, 12, 13, 6, 20, 9, 10, 30):
        agree(plain, ours, X, t)
    assert captures(ours) == 3


def test_numbers_are_of_their_class() -> None:
    class Asks(Timed):
        def forward(self, x: torch.Tensor, t: float) -> torch.Tensor:
            kind = torch.float64 if isinstance(t, float) else torch.int64
            return self.fc(x) + torch.tensor([t], dtype=kind) * (2 if isinstance(t, int) else 3)

    plain, ours = pair(Asks())
    for t in (0.25, 0.75, 1.5, 3, 4, 5):
        agree(plain, ours, X, t)
    assert captures(ours) <= 5


def test_the_very_class_of_a_number() -> None:
    class Asks(Timed):
        def forward(self, x: torch.Tensor, t: float) -> torch.Tensor:
            return self.fc(x) * t if type(t) is int else self.fc(x)

    plain, ours = pair(Asks())
    for t in (3, 4, 5, 0.5, 0.25, 3):
        agree(plain, ours, X, t)


@pytest.mark.filterwarnings("ignore:.*runs in:RuntimeWarning")
def test_numbers_that_must_be_fixed_leave_other_calls_their_graph() -> None:
    class Layers(Timed):
        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            for _ in range(depth):
                x = self.fc(x).tanh()
            return x * math.sqrt(depth)

    plain, ours = pair(Layers())
    agree(plain, ours, X, 2)
    for depth in range(3, 16):
        agree(plain, ours, X, depth)
    before = captures(ours)
    for _ in range(3):
        agree(plain, ours, X, 2)
        agree(plain, ours, X, 15)
    assert captures(ours) <= before + 2
    assert ours.report().captures[-1].native_nodes > 0


def test_gradients_of_gradients_with_a_live_number() -> None:
    plain, ours = pair(Timed())
    for t in (3, 5, 6):
        slopes = []
        for m in (plain, ours):
            x = X.clone().requires_grad_()
            (g,) = torch.autograd.grad(m(x, t).square().sum(), x, create_graph=True)
            m.zero_grad()
            g.square().sum().backward()
            slopes.append([x.grad, m.fc.weight.grad])
        torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-5, atol=1e-5)
    assert captures(ours) == 2
