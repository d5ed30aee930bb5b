# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Classes of modules on which a graph could silently differ from PyTorch, each step against it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule

told: list[str] = []


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("meter", torch.zeros(()))


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    told.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def steps(model: nn.Module, inputs: list[Any], after: Callable[[], Any] = lambda: None) -> Any:
    """Return the result, the gradients and buffers and what ``after`` gives, or the error, of each step."""
    seen: list[Any] = []
    for given in inputs:
        model.zero_grad()
        args = [
            t.clone().requires_grad_(t.is_floating_point()) if isinstance(t, torch.Tensor) else t
            for t in (given if isinstance(given, tuple) else (given,))
        ]
        try:
            result = model(*args)
            result.sum().backward()
        except (RuntimeError, AssertionError, IndexError, ValueError) as error:
            seen.append(type(error).__name__)
        else:
            seen += [result.detach().clone(), *(a.grad for a in args if torch.is_tensor(a))]
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        seen += [b.clone() for b in model.buffers()]
        seen.append(copy.deepcopy(after()))
    return seen


def assert_like_pytorch(
    module: nn.Module, inputs: list[Any], after: Callable[[], Any] = lambda: None
) -> ORTModule:
    """Assert that each step leaves what PyTorch's leaves; return the wrapped module."""
    plain = copy.deepcopy(module)
    expected = steps(plain, inputs, after)
    told.clear()
    wrapped = ORTModule(module)
    actual = steps(wrapped, inputs, after)
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs)
        else:
            assert mine == theirs
    return wrapped


def native_share(wrapped: ORTModule) -> float:
    return wrapped.report().native_share


# --- autograd functions


class Tells(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Tells.runs += 1
        told.append("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        told.append("backward")
        return gradient


class CountsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, meter: torch.Tensor) -> torch.Tensor:
        ctx.meter = meter
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.meter.add_(gradient.abs().sum())
        return gradient * 2, None


class NeedsContentsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 if float(gradient.sum()) > 0 else gradient


def test_effects_of_an_autograd_function_come_once_per_call() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Tells.apply(self.linear(x))

    runs = Tells.runs
    wrapped = assert_like_pytorch(Net(), [torch.randn(n, 4) for n in (3, 5, 3)], lambda: told)
    assert told == ["forward", "backward"] * 3
    assert Tells.runs == runs + 6
    assert 0 < native_share(wrapped) < 1


def test_a_forward_that_reads_what_an_autograd_function_changes() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Tells.apply(self.linear(x)) * len(told)

    assert_like_pytorch(Net(), [torch.randn(3, 4) for _ in range(3)], lambda: told)


def test_effects_of_an_autograd_function_whose_result_is_not_used() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Tells.apply(x)
            return self.linear(x)

    assert_like_pytorch(Net(), [torch.randn(3, 4) for _ in range(3)], lambda: told)


def test_a_backward_that_writes_to_a_buffer_runs_in_pytorch() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return CountsInBackward.apply(self.linear(x), self.meter)

    wrapped = assert_like_pytorch(Net(), [torch.randn(3, 4) for _ in range(3)])
    assert "writes to an argument of its forward" in wrapped.report().captures[0].fallback


def test_a_backward_that_needs_contents_stays_a_node() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return NeedsContentsInBackward.apply(self.linear(x))

    wrapped = assert_like_pytorch(Net(), [torch.randn(3, 4) for _ in range(3)])
    assert 0 < native_share(wrapped) < 1
