# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients that are handed over while the backward goes on, where somebody waits for them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ortrain import ORTModule, program


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_LEAST_PART", 64)


def chain(depth: int = 5) -> nn.Sequential:
    torch.manual_seed(2)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers)


def watch(model: nn.Module, see: Callable[[nn.Parameter], None]) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(see)


def pair() -> tuple[nn.Module, nn.Module, ORTModule]:
    plain = chain()
    model = copy.deepcopy(plain)
    for m in (plain, model):
        watch(m, lambda p: None)
    return plain, model, ORTModule(model)


def same(plain: nn.Module, model: nn.Module) -> None:
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-6)


def test_optimizer_in_the_backward_sees_one_gradient_at_a_time() -> None:
    results = []
    for wrap in (lambda m: m, ORTModule):
        model, alive = chain(), []

        def step(p: nn.Parameter, model: nn.Module = model, alive: list[int] = alive) -> None:
            alive.append(sum(q.grad is not None for q in model.parameters()))
            with torch.no_grad():
                p -= 0.1 * p.grad
            p.grad = None

        watch(model, step)
        called = wrap(model)
        for _ in range(3):
            called(torch.ones(3, 16)).square().sum().backward()
        results.append((model.state_dict(), max(alive)))
    (expected, _), (found, most) = results
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])
    assert most <= 3  # a layer's weight and bias, not all ten


def test_retain_graph_and_several_forwards() -> None:
    plain, model, wrapped = pair()
    for called in (plain, wrapped):
        first, second = called(torch.ones(2, 16)), called(torch.full((4, 16), 0.5))
        second.sum().backward(retain_graph=True)
        first.square().sum().backward()
        second.sum().backward()
    same(plain, model)


def test_second_backward_is_refused_as_in_pytorch() -> None:
    _, _, wrapped = pair()
    loss = wrapped(torch.ones(2, 16)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("layer", [0, 4, 8])
def test_gradient_of_some_parameters_alone(layer: int) -> None:
    plain, model, wrapped = pair()
    found = []
    for m, called in ((plain, plain), (model, wrapped)):
        loss = called(torch.ones(2, 16)).sum()
        found.append(torch.autograd.grad(loss, m[layer].weight, retain_graph=True)[0])
        found.append(torch.autograd.grad(loss, m[layer].bias)[0])
    torch.testing.assert_close(found[2], found[0])
    torch.testing.assert_close(found[3], found[1])


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = chain(2), chain(3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x).sum(), self.b(x).sum()


def test_other_results_than_guessed() -> None:
    plain = TwoResults()
    model = copy.deepcopy(plain)
    for m in (plain, model):
        watch(m, lambda p: None)
    wrapped = ORTModule(model)
    for called in (plain, wrapped):
        called(torch.ones(2, 16))[1].backward()
        called(torch.ones(2, 16))[0].backward()
        sum(called(torch.ones(2, 16))).backward()
    same(plain, model)


def test_gradients_of_arguments_and_accumulation() -> None:
    plain, model, wrapped = pair()
    given = []
    for called in (plain, wrapped):
        x = torch.ones(2, 16, requires_grad=True)
        for _ in range(2):
            called(x * 2).square().sum().backward()
        given.append(x.grad)
    same(plain, model)
    torch.testing.assert_close(given[1], given[0])


def test_second_derivatives_come_whole() -> None:
    plain, model, wrapped = pair()
    for called in (plain, wrapped):
        loss = called(torch.ones(2, 16)).square().sum()
        gradients = torch.autograd.grad(loss, list(called.parameters()), create_graph=True)
        sum(g.square().sum() for g in gradients).backward()
    same(plain, model)


def test_without_hooks_the_backward_is_one_node() -> None:
    wrapped = ORTModule(chain())
    result = wrapped(torch.ones(2, 16))
    below = [f for f, _ in result.grad_fn.next_functions if f is not None]
    assert not any("Part" in type(f).__name__ for f in below)


class RootMeanSquare(nn.Module):
    """A weight that its own gradient does not need, and the one of its argument does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_a_parameter_may_change_once_its_gradient_is_there() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(16, 16), RootMeanSquare(16), nn.Linear(16, 16), RootMeanSquare(16)
    )
    model = copy.deepcopy(plain)
    found = []
    for m, called in ((plain, plain), (model, ORTModule(model))):
        gradients: dict[int, torch.Tensor] = {}
        numbers = {id(p): i for i, p in enumerate(m.parameters())}

        def spoil(p: nn.Parameter, gradients: dict = gradients, numbers: dict = numbers) -> None:
            gradients[numbers[id(p)]] = p.grad.clone()
            with torch.no_grad():
                p.fill_(float("nan"))

        watch(m, spoil)
        called(torch.arange(48.0).view(3, 16)).square().sum().backward()
        found.append(gradients)
    assert found[0].keys() == found[1].keys()
    for i, gradient in found[0].items():
        torch.testing.assert_close(found[1][i], gradient, rtol=1e-4, atol=1e-4)


def test_a_parameter_that_is_still_needed_may_not_change() -> None:
    _, model, wrapped = pair()
    first, last = model[0].weight, model[8].weight

    def spoil(_: nn.Parameter) -> None:
        with torch.no_grad():
            model[2].weight.zero_()

    last.register_post_accumulate_grad_hook(spoil)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        wrapped(torch.ones(2, 16)).sum().backward()
    assert first.grad is None


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = chain(4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x)
        return y, (2 * y).exp()


def test_a_backward_that_stopped_half_way_does_not_go_on_in_the_next() -> None:
    plain = Twice()
    model = copy.deepcopy(plain)
    for m in (plain, model):
        watch(m, lambda p: None)
    wrapped = ORTModule(model)
    for m, called in ((plain, plain), (model, wrapped)):
        a, b = called(torch.ones(2, 16))
        (a.sum() + b.sum()).backward()
        m.zero_grad()
        a, b = called(torch.ones(2, 16))
        torch.autograd.grad(a.sum() + b.sum(), m.body[6].weight, retain_graph=True)
        a.sum().backward()
    same(plain, model)
