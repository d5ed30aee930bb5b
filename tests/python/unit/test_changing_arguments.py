# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers among the arguments and attributes that change from call to call."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses import fake_impls

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


def test_an_int_may_equal_a_size_by_chance() -> None:
    plain, ours = pair(Timed())
    for t in (5, 3, 7, 4, 12):
        agree(plain, ours, X, t)
    assert captures(ours) == 2


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


def test_a_float_without_pytorchs_rule_for_item() -> None:
    ORTModule(Timed())(X, 0.5)
    # PyTorch's own exports take the rule away with those that they have put in.
    with mock.patch.dict(fake_impls.op_implementations_dict):
        fake_impls.op_implementations_dict.pop(torch.ops.aten.item.default, None)
        plain, ours = pair(Timed())
        for t in (0.5, 0.75, 1.25, 3.5):
            agree(plain, ours, X, t)
        assert captures(ours) == 2
        assert torch.ops.aten.item.default not in fake_impls.op_implementations_dict


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


# --- attributes


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.fc.alpha = 0.5
        self.steps = 0
        self.warm = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.fc.alpha + x * (1 - self.fc.alpha) ** 2 + self.warm


@pytest.mark.since_torch(2, 12)
def test_an_annealed_attribute_costs_two_captures() -> None:
    plain, ours = pair(Annealed())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for step in range(20):
            for m in (plain, ours):
                m.fc.alpha = 0.5 + step / 40
                m.steps = step  # nobody reads it
            agree(plain, ours, X)
    assert captures(ours) == 2
    assert ours.fc.alpha == plain.fc.alpha and type(ours.fc.alpha) is float
    for m in (plain, ours):
        m.warm = 5
    agree(plain, ours, X)
    for warm in (6, 7, 8, 9):
        for m in (plain, ours):
            m.warm = warm
            m.fc.alpha -= 0.125
        agree(plain, ours, X)
    assert captures(ours) == 3


def test_a_live_attribute_may_become_something_else() -> None:
    plain, ours = pair(Annealed())
    for alpha in (0.5, 0.25, 0.75, 1, torch.tensor(2.0), True, 0.125):
        for m in (plain, ours):
            m.fc.alpha = alpha
        agree(plain, ours, X)


@pytest.mark.since_torch(2, 12)
def test_gradients_of_gradients_take_the_attribute_of_their_forward() -> None:
    plain, ours = pair(Annealed())
    for alpha in (0.5, 0.25, 0.75):
        seen = []
        for m in (plain, ours):
            m.fc.alpha = alpha
            x = X.clone().requires_grad_()
            y = m(x).square().sum()
            if alpha != 0.5 and m is ours:  # the first graph holds it fixed
                m.fc.alpha = alpha + 1
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            g.square().sum().backward()
            seen.append(x.grad)
        torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*runs in:RuntimeWarning")
def test_an_attribute_that_decides_has_graphs_of_its_own() -> None:
    class Decides(Annealed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) * 2 if self.fc.alpha > 0.6 else self.fc(x)

    plain, ours = pair(Decides())
    for step in range(5):
        for m in (plain, ours):
            m.fc.alpha = 0.5 + step / 20
        agree(plain, ours, X)
    assert captures(ours) == 5


class Rescaled(nn.Module):
    """Rescales its weight where its mode has changed, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.rescaled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rescaled == self.training:
            with torch.no_grad():
                self.fc.weight.mul_(0.5 if not self.training else 2.0)
            self.rescaled = not self.training
        return self.fc(x)


@pytest.mark.filterwarnings("ignore:.*runs in:RuntimeWarning")
def test_a_switch_of_modes_leaves_the_module_its_graph() -> None:
    plain, ours = pair(Rescaled())
    for _ in range(4):
        for training in (True, True, True, False):
            plain.train(training), ours.train(training)
            agree(plain, ours, X)
    ours.train(), plain.train()
    agree(plain, ours, X)
    before = len(ours.report().captures)
    engine = ours._ortrain_engine
    assert engine._attempts.left_to is None
    for _ in range(3):
        agree(plain, ours, X)
    assert len(ours.report().captures) == before


@pytest.mark.filterwarnings("ignore:.*runs in:RuntimeWarning")
def test_a_module_that_counts_for_a_while_is_captured_once_it_rests() -> None:
    class Counts(Annealed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.steps < 20:
                self.steps += 1
            return self.fc(x) * self.steps

    plain, ours = pair(Counts())
    for _ in range(60):
        agree(plain, ours, X)
    assert captures(ours) == 1 and ours.steps == 20


@pytest.mark.since_torch(2, 12)
@pytest.mark.parametrize("model", [Timed, Annealed])
def test_live_numbers_in_verified_steps(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    ours = ORTModule(model(), verify=8)
    for step in range(8):
        if model is Timed:
            ours(X, 3 + step).sum().backward()
        else:
            ours.fc.alpha = 0.5 + step / 16
            ours(X).sum().backward()
    assert captures(ours) == 2
    assert ours.report().verified.startswith("1-8; gradients of 1-8")


def test_names_of_variables_of_the_script_are_no_attributes() -> None:
    plain, ours = pair(Annealed())
    for step in range(12):
        globals()["steps"] = step  # the forward names an attribute so, nobody the variable
        globals()["warm"] = torch.ones(step)
        agree(plain, ours, X)
    assert captures(ours) == 1
