# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Kernels that Python code gives to operators and takes back between calls."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule, ORTTrainer, optim

_numbers = itertools.count()


class Applying(nn.Module):
    """Applies an operator between two layers."""

    def __init__(self, operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.operator = operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operator(self.linear(x)) + 1


@contextlib.contextmanager
def kernel(
    namespace: str, operator: str, function: Callable[..., torch.Tensor], *keys: str
) -> Iterator[None]:
    library = torch.library.Library(namespace, "IMPL")
    try:
        for key in keys:
            library.impl(operator, function, key)
        yield
    finally:
        library._destroy()


def assert_follows(wrapped: ORTModule, module: nn.Module, x: torch.Tensor) -> None:
    results = []
    for each in (wrapped, module):
        module.zero_grad()
        result = each(x)
        result.sum().backward()
        results.append((result.detach(), module.linear.weight.grad.clone()))  # type: ignore[union-attr, operator]
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize(
    "keys",
    [
        ["CompositeImplicitAutograd"],
        ["CompositeExplicitAutograd"],
        ["CPU", "Meta"],
        ["Autograd", "Meta"],
    ],
    ids="+".join,
)
def test_an_operator_of_others_gets_another_kernel(keys: list[str]) -> None:
    namespace = f"ortrain_test_{next(_numbers)}"
    definition = torch.library.Library(namespace, "DEF")
    definition.define("scaled(Tensor x) -> Tensor")
    module = Applying(getattr(torch.ops, namespace).scaled)
    wrapped = ORTModule(module)
    x = torch.randn(3, 4)

    def value(runs: Any) -> torch.Tensor:
        result: torch.Tensor = runs(x)
        return result.detach()

    try:
        for factor in (2, 3, 2):
            with kernel(namespace, "scaled", lambda y, factor=factor: y * factor, *keys):
                for _ in range(2):
                    torch.testing.assert_close(value(wrapped), value(module))
    finally:
        definition._destroy()


def test_an_operator_of_pytorch_gets_another_kernel() -> None:
    module = Applying(torch.celu)
    wrapped = ORTModule(module)
    x = torch.randn(3, 4)
    assert_follows(wrapped, module, x)
    assert wrapped.report().native_nodes > 0
    with kernel("aten", "celu", lambda y, alpha=1.0: y * 5, "AutogradCPU"):
        with pytest.warns(RuntimeWarning, match="another kernel: aten/celu/AutogradCPU"):
            assert_follows(wrapped, module, x)
        # A module that has not run before.
        with pytest.warns(RuntimeWarning, match="another kernel"):
            assert_follows(ORTModule(module), module, x)
    assert_follows(wrapped, module, x)


def test_a_trainer_follows_another_kernel_of_pytorch() -> None:
    class Loss(Applying):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = super().forward(x)
            return result.square().mean()

    x = torch.randn(3, 4)
    description = {"inputs": [("x", ["batch", 4])], "outputs": [("loss", [], True)]}
    module = Loss(torch.celu)
    trainer = ORTTrainer(module, description, optim.SGDConfig(lr=0.1))

    def assert_step() -> None:
        torch.testing.assert_close(trainer.eval_step(x), module(x).detach())

    assert_step()
    with kernel("aten", "celu", lambda y, alpha=1.0: y * 5, "AutogradCPU"):
        assert_step()
    assert_step()
