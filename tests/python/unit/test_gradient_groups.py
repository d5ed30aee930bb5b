# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Backwards from some of several results come to what these reach, as in PyTorch: to nothing else's hooks and graphs."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.gradient_groups import Collected


class Heads(nn.Module):
    """Results that reach: all, the first head, the second one, both arguments, nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = (nn.Linear(3, 3) for _ in range(3))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.body(x).tanh()
        self.steps += 1
        a, b = self.first(h), self.second(h)
        return a.sum() + b.sum(), a, b, x * y, x.detach() * 2


def both(seen: list[Any] | None = None) -> tuple[nn.Module, ORTModule]:
    theirs = Heads()
    return theirs, ORTModule(copy.deepcopy(theirs))


def arguments() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, generator=g).requires_grad_() for _ in range(2)]


SUBSETS = [s for n in (1, 2, 3, 4) for s in itertools.combinations(range(4), n)]


@pytest.mark.parametrize("chosen", SUBSETS)
def test_gradients_and_hooks_of_what_is_reached(chosen: tuple[int, ...]) -> None:
    seen = []
    for model in both():
        fired: list[str] = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, n=name, to=fired: to.append(n))
            p.register_hook(lambda g, n=name, to=fired: to.append(f"{n} {g.shape}"))
        steps = []
        for _ in range(2):
            x, y = arguments()
            for p in model.parameters():
                p.grad = None
            results = model(x, y)
            sum(results[i].square().sum() for i in chosen).backward()
            steps.append([x.grad, y.grad, *(p.grad for p in model.parameters())])
        seen.append((steps, sorted(fired)))
    (expected, hooks), (ours, our_hooks) = seen
    assert our_hooks == hooks
    for theirs, mine in zip(expected, ours, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_graphs_behind_arguments_that_are_not_reached_stay() -> None:
    for model in both():
        x, y = arguments()
        before = y.sin()
        model(x, before)[1].sum().backward()
        before.sum().backward()  # its graph was not freed
        assert y.grad is not None


@pytest.mark.parametrize("index", range(4))
def test_one_result_after_the_other(index: int) -> None:
    gradients = []
    for model in both():
        x, y = arguments()
        results = model(x, y)
        for i in (index, (index + 1) % 4, (index + 2) % 4):
            results[i].sum().backward(retain_graph=True)
        gradients.append([x.grad, y.grad, *(p.grad for p in model.parameters())])
        with pytest.raises(RuntimeError, match="does not require grad"):
            results[4].sum().backward()
    torch.testing.assert_close(gradients[1], gradients[0])


def test_some_inputs_gradients_of_gradients_and_batches() -> None:
    seen = []
    for model in both():
        x, y = arguments()
        loss, a, b, product, _ = model(x, y)
        w = model.get_parameter("first.weight")
        some = torch.autograd.grad(loss + a.sum(), [w, x], retain_graph=True)
        none = torch.autograd.grad(b.sum(), [w, x], retain_graph=True, allow_unused=True)
        (first,) = torch.autograd.grad(a.square().sum(), x, create_graph=True)
        second = torch.autograd.grad(first.square().sum() + product.sum(), [x, y, w])
        seen.append([*some, *none, first.detach(), *second])
    torch.testing.assert_close(seen[1], seen[0])


def test_nothing_is_left_over() -> None:
    model = both()[1]
    x, y = arguments()
    results = model(x, y)
    torch.autograd.grad(
        results[0], [x], retain_graph=True
    )  # the heads' are made, and nobody wants them
    held = weakref.ref(results[0].grad_fn)
    del results
    gc.collect()
    assert held() is None


def test_what_comes_late_goes_to_those_that_wait() -> None:
    def run(gradients: Any) -> list[Any]:
        ones = torch.ones(1)
        a, b = (0 if g is None else float(g) for g in gradients)
        return [ones * (a + b), ones * a if a else None, ones * b if b else None]

    held = Collected(2, run)
    assert held.add(7, [0], [torch.tensor(2.0)])
    assert held.take(7, [1]) == [torch.tensor([2.0])]
    assert held.add(7, [1], [torch.tensor(3.0)])
    assert held.take(7, [2]) == [torch.tensor([3.0])]
    assert held.take(7, [0]) == [torch.tensor([5.0])]
    assert not held.add(7, [0], [None]) and held.take(7, [0]) == [None]
    for task in range(20):
        held.add(task, [0], [torch.tensor(1.0)])
        held.take(task, [1])
    assert len(held._made) <= 6 and not held._arrived


@pytest.mark.parametrize("make", [lambda m: m, ORTModule])
def test_optimizers_in_hooks(make: Callable[[nn.Module], Any]) -> None:
    def train(model: Any) -> list[torch.Tensor]:
        optimizers = {
            p: torch.optim.SGD([p], 0.1, momentum=0.9, weight_decay=0.1) for p in model.parameters()
        }

        def step(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad(set_to_none=False)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for i in range(4):
            model(*arguments())[1 + i % 2].sum().backward()
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(train(make(Heads())), train(Heads()))
