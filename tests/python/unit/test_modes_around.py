# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Modes of PyTorch around a call, and what a forward's code reads besides values."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain import ORTModule
from ortrain.capture.outside_reads import outside_read


class DoublesLinear(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is nn.functional.linear else result


class CountsOperators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")
def test_modes_see_each_operator() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    wrapped = ORTModule(model)
    x = torch.randn(2, 3)
    wrapped(x)
    with DoublesLinear():
        torch.testing.assert_close(wrapped(x), model(x))
    counts = []
    for called in (model, wrapped):
        with CountsOperators() as mode:
            called(x)
        counts.append(mode.count)
    assert counts[0] == counts[1] > 0
    torch.testing.assert_close(wrapped(x), model(x))
    assert wrapped.report().captures[0].native_nodes > 0


@pytest.mark.filterwarnings("ignore")
def test_forward_derivatives() -> None:
    model = nn.Linear(3, 3).requires_grad_(False)
    wrapped = ORTModule(model)
    x, tangent = torch.randn(2, 3), torch.randn(2, 3)
    wrapped(x)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(wrapped(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(found, tangent @ model.weight.T)


@pytest.mark.filterwarnings("ignore")
def test_hooks_of_saved_tensors() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    wrapped = ORTModule(Scales())
    x = torch.ones(2, 3)
    wrapped(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2):
        wrapped(x).sum().backward()
    assert torch.equal(wrapped.weight.grad, torch.full((3,), 4.0))
    wrapped.zero_grad()
    with torch.autograd.graph.save_on_cpu():  # which changes no numbers
        wrapped(x).sum().backward()
    assert torch.equal(wrapped.weight.grad, torch.full((3,), 2.0))


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_switches_of_pytorch_are_part_of_the_key() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y * 2 if torch.are_deterministic_algorithms_enabled() else y

    wrapped = ORTModule(Asks())
    x = torch.randn(2, 3)
    with deterministic():
        doubled = wrapped(x)
    torch.testing.assert_close(doubled, 2 * wrapped(x))


@pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad])
@pytest.mark.filterwarnings("ignore")
def test_the_grad_mode_of_the_caller(outer: Callable[[], Any]) -> None:
    class Switches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
            with torch.enable_grad():
                inner = self.layer(x)
            return inner, self.layer(x), torch.is_grad_enabled()

    model = Switches()
    wrapped = ORTModule(model)
    x = torch.randn(2, 3)
    for _ in range(2):
        with outer():
            expected, found = model(x), wrapped(x)
        assert found[2] is expected[2]
        assert [t.requires_grad for t in found[:2]] == [t.requires_grad for t in expected[:2]]
        torch.testing.assert_close(found[:2], expected[:2])


def reads_environment() -> str:
    return os.environ["HOME"]


def reads_a_clock() -> float:
    return time.time()


def reads_a_file() -> str:
    with open("x") as file:
        return file.read()


def asks_for_a_class(x: torch.Tensor) -> bool:
    return type(x) is torch.Tensor


def reads_a_gradient(x: nn.Parameter) -> Any:
    return x.grad


def computes(self: Any, x: torch.Tensor) -> torch.Tensor:
    kinds = [type(layer) for layer in self.layers]
    return torch.autograd.functional is not None and x * self.time * self.gradient * len(kinds)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (reads_environment, "environment variables"),
        (reads_a_clock, "a clock"),
        (reads_a_file, "files"),
        (asks_for_a_class, "the class of a tensor"),
        (reads_a_gradient, "gradients"),
        (computes, ""),
    ],
)
def test_reads_that_no_guard_compares(function: Callable[..., Any], what: str) -> None:
    assert outside_read(function.__code__, function.__globals__) == what
