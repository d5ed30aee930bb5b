# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Several backwards of one forward at once: in threads, and one inside of another."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule, _core


class Twice(torch.autograd.Function):
    """Runs in PyTorch; its backward calls what `inside` holds, once."""

    inside: Callable[[], None] | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        inside, Twice.inside = Twice.inside, None
        if inside is not None:
            inside()
        return gradient * 2


class Net(nn.Module):
    """Its gradients come in several parts where somebody waits for them.

    Args:
      escapes: Has a part that PyTorch runs.
      dropout: The probability.
    """

    def __init__(self, escapes: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 600), nn.Linear(600, 600)
        self.third, self.last = nn.Linear(600, 600), nn.Linear(600, 64)
        self.dropout, self.escapes = nn.Dropout(dropout), escapes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.dropout(torch.tanh(self.second(torch.tanh(self.first(x)))))
        if self.escapes:
            h = Twice.apply(h)
        return self.last(torch.tanh(self.third(h)))


def pair(**options: Any) -> tuple[Net, Net, ORTModule]:
    torch.manual_seed(0)
    plain = Net(**options)
    model = copy.deepcopy(plain)
    return plain, model, ORTModule(model)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in model.parameters()]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"escapes": True}], ids=str)
@pytest.mark.parametrize("in_parts", [False, True])
def test_threads_share_a_graph(options: dict[str, Any], in_parts: bool) -> None:
    _, model, wrapped = pair(**options)
    parameters = list(model.parameters())
    if in_parts:
        model.last.weight.register_post_accumulate_grad_hook(lambda p: None)
    y = wrapped(torch.randn(64, 64))
    ones = torch.ones_like(y)
    expected = torch.autograd.grad(y, parameters, ones, retain_graph=True)
    wrong: list[Any] = []

    def work(factor: float) -> None:
        try:
            for _ in range(15):
                found = torch.autograd.grad(y, parameters, ones * factor, retain_graph=True)
                same(found, [g * factor for g in expected])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(float(f),)) for f in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_threads_differentiate_a_gradient() -> None:
    _, model, wrapped = pair()
    before = dict(model.named_parameters())
    parameters = list(model.parameters())
    y = wrapped(torch.randn(8, 64)).square().sum()
    expected = torch.autograd.grad(y, parameters, create_graph=True)
    wrong: list[Any] = []

    def work() -> None:
        try:
            for _ in range(10):
                same(torch.autograd.grad(y, parameters, create_graph=True), expected)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert all(p is before[name] for name, p in model.named_parameters())


def test_backward_inside_of_an_escape() -> None:
    results = []
    plain, model, wrapped = pair(escapes=True)
    x = torch.randn(64, 64)
    for net, called in ((plain, plain), (model, wrapped)):
        inner: list[Any] = []
        loss = called(x).square().sum()

        def inside(loss: Any = loss, net: Any = net, inner: list[Any] = inner) -> None:
            inner.extend(torch.autograd.grad(loss, list(net.parameters()), retain_graph=True))

        Twice.inside = inside
        loss.backward(retain_graph=True)
        results.append([*inner, *gradients(net)])
    same(results[1], results[0])


@pytest.mark.parametrize("where", ["last", "third", "second", "first"])
@pytest.mark.parametrize("other_outputs", [False, True])
def test_backward_inside_of_a_hook(where: str, other_outputs: bool) -> None:
    results = []
    plain, model, wrapped = pair()
    x = torch.randn(64, 64)
    for net, called in ((plain, plain), (model, wrapped)):
        inner: list[Any] = []
        left = [2]
        loss: Any = None

        def hook(p: Any, left: Any = left, net: Any = net, inner: Any = inner) -> None:
            if left[0]:  # the second one lies in the first
                left[0] -= 1
                graph = {"create_graph": True} if other_outputs else {"retain_graph": True}
                found = torch.autograd.grad(loss, list(net.parameters()), **graph)  # noqa: B023
                inner.extend(g.detach() for g in found)

        getattr(net, where).weight.register_post_accumulate_grad_hook(hook)
        loss = called(x).square().sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        results.append([*inner, *gradients(net)])
    same(results[1], results[0])


def test_a_backward_that_fails_half_way_leaves_the_run_to_the_next() -> None:
    _, model, wrapped = pair()
    fails = [True]

    def hook(p: torch.Tensor) -> None:
        if fails:
            fails.pop()
            raise ValueError("from a hook")

    model.last.weight.register_post_accumulate_grad_hook(hook)
    loss = wrapped(torch.randn(64, 64)).square().sum()
    with pytest.raises(ValueError, match="from a hook"):
        loss.backward(retain_graph=True)
    model.zero_grad()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    step = loss.grad_fn.next_functions[0][0].next_functions[0][0].step
    assert not step._unfinished
    assert not step._in_use.locked()
    loss.backward()
    same(gradients(model), list(expected))


def test_gradients_of_a_node_hook_reach_later_parts() -> None:
    plain, model, wrapped = pair()
    model.last.weight.register_post_accumulate_grad_hook(lambda p: None)
    x = torch.randn(64, 64)
    plain(x).sum().backward()
    y = wrapped(x)
    y.grad_fn.register_hook(lambda made, _: tuple(None if g is None else g * 1 for g in made))
    y.sum().backward()
    same(gradients(model), gradients(plain))


def test_unfinished_backwards_keep_nothing_alive() -> None:
    _, model, wrapped = pair()
    model.last.weight.register_post_accumulate_grad_hook(lambda p: None)
    loss = wrapped(torch.randn(64, 64)).square().sum()
    torch.autograd.grad(loss, model.last.weight, retain_graph=True)  # later parts are not asked for
    step = weakref.ref(loss.grad_fn.next_functions[0][0].next_functions[0][0].step)
    assert step() is not None
    gc.disable()
    try:
        del loss
        assert step() is None
    finally:
        gc.enable()


def test_a_run_that_runs_refuses_another_call() -> None:
    _, model, wrapped = pair(escapes=True)
    loss = wrapped(torch.randn(64, 64)).square().sum()
    run = loss.grad_fn.next_functions[0][0].next_functions[0][0].step.run
    seen: list[str] = []

    def inside() -> None:
        for call in (lambda: run.forward([]), lambda: run.continue_backward(1)):
            with pytest.raises(_core.OrtrainError) as error:
                call()
            seen.append(str(error.value))

    Twice.inside = inside
    loss.backward()
    assert len(seen) == 2
    assert all("while it runs" in text for text in seen)
