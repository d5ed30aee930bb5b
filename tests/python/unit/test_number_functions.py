# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What functions of Python and NumPy give for sizes and numbers that a graph takes for any: the kind as well as the value."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, tensor

from ortrain import ORTModule

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "max with a smaller float": lambda n: max(n, 1.0),
    "max with a float before": lambda n: max(1.0, n),
    "max with a float between": lambda n: max(n, 6.5),
    "max of a list": lambda n: max([n, 6.5, 2]),
    "max by a key": lambda n: max([n, 1.0], key=lambda v: -v),
    "min with a float between": lambda n: min(n, 6.5),
    "min of ints": lambda n: min(n, 6),
    "math.pow": lambda n: math.pow(n, 2),
    "math.pow beyond int64": lambda n: math.pow(n, 30),
    "math.pow as exponent": lambda n: math.pow(2, n),
    "math.ceil": lambda n: math.ceil(n / 2),
    "np.ceil": lambda n: np.ceil(n / 2),
    "np.floor": lambda n: np.floor(n / 2),
    "np.trunc": lambda n: np.trunc(n / 2),
    "int of np.ceil": lambda n: int(np.ceil(n / 2)),
    "np.maximum": lambda n: np.maximum(n, 2.5),
    "np.minimum": lambda n: np.minimum(n, 9.0),
    "np.clip": lambda n: np.clip(n, 0, 4),
    "np.sqrt": np.sqrt,
    "np.divide": lambda n: np.divide(n, 2),
    "np.power": lambda n: np.power(n, 2),
    "np.prod": lambda n: np.prod((n, 4)),
    "times np.float64": lambda n: n * np.float64(2),
    "np.float64 times": lambda n: np.float64(2) * n,
    "np.float32 times": lambda n: np.float32(0.1) * n,
    "times np.int64": lambda n: n * np.int64(3),
    "by np.int64": lambda n: n / np.int64(2),
    "a class of NumPy": lambda n: n * (2 if isinstance(np.ceil(n / 2), np.floating) else 3),
    "what comes of one": lambda n: n + (isinstance(-np.add(n, 2) * 3 - n, np.int64)),
    "no int of Python": lambda n: n + isinstance(n * np.int64(2), int),
    "an item": lambda n: (n * np.float64(2)).item(),
    "a dtype": lambda n: n + (np.floor(n / 2) + 1).dtype.itemsize,
    "a text": lambda n: n * len(repr(np.multiply(n, 2))),
    "the very class": lambda n: n + (type(np.ceil(n / 2) * 2) is np.float64),
    "a number of fewer bits": lambda n: np.multiply(n, 10) * np.int8(3),
    "a number of other bits": lambda n: np.add(n, 100) + np.array([200], np.uint8)[0],
    "a float of fewer bits": lambda n: np.ceil(n / 2) * np.float16(0.1),
    "an int of fewer bits": lambda n: np.multiply(n, 2) * np.int32(3),
    "np.mean": lambda n: np.mean([n, 3]),
    "rounded": lambda n: n + (type(round(np.ceil(n / 2))) is int) + round(np.log(2) * n, 2),
    "floor of floats": lambda n: np.multiply(n, 2) // 2.5,
    "bits": lambda n: (np.multiply(n, 2) << 1) | 1,
    "a size itself": lambda n: n + isinstance(n, np.integer) + isinstance(n / 2, np.floating),
    "times an array": lambda n: float((n * np.arange(3.0)).sum()),
}


class Takes(nn.Module):
    """Makes tensors of what a function gives, whose dtypes tell its kind."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.linspace(-1, 1, 4)), function

    def forward(self, x: torch.Tensor, n: Any = None) -> Any:
        number = self.function(x.shape[0] if n is None else n)
        filled = torch.full((4,), number)
        filled[0] = 0.75
        return x * self.weight * filled, torch.arange(4) * number


class Makes(Takes):
    """Also one tensor of the number itself."""

    def forward(self, x: torch.Tensor, n: Any = None) -> Any:
        number = self.function(x.shape[0] if n is None else n)
        return x * self.weight, torch.tensor(number), torch.tensor([number, 1])


MADE: dict[str, Callable[[Any], torch.Tensor]] = {
    "torch.tensor": lambda n: torch.tensor(np.ceil(n / 2)),
    "of a list": lambda n: torch.tensor([np.log(1e4) / n, 1.0]),
    "of lists": lambda n: torch.tensor([[1.0, np.log(1e4) / n]]),
    "torch.as_tensor": lambda n: torch.as_tensor([np.float64(0.1) * n]),
    "torch.asarray": lambda n: torch.asarray(np.floor(n / 2)),
    "with a dtype": lambda n: torch.tensor(np.ceil(n / 2), dtype=torch.float32),
    "beside a float of NumPy's": lambda n: torch.tensor([np.float64(2.5), n]),
    "in a sequence": lambda n: torch.tensor(_Pair(np.ceil(n / 2), 1.0)),
    "that has a gradient": lambda n: torch.tensor([np.log(1e4) / n], requires_grad=True),
    "by its name": lambda n: tensor(np.ceil(n / 2)),
    "of a float of Python": lambda n: torch.tensor(n / 2),
}


class _Pair:
    """Has items and nothing else."""

    def __init__(self, *items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


class MakesAtOnce(Takes):
    """Makes a tensor in the expression that calls NumPy."""

    def forward(self, x: torch.Tensor, n: Any = None) -> Any:
        made = self.function(x.shape[0] if n is None else n)
        return x * self.weight, made, torch.arange(4) * made.flatten()[0]


def agree(module: nn.Module, calls: list[tuple[Any, ...]]) -> ORTModule:
    ours = ORTModule(copy.deepcopy(module))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for call in calls:
            for actual, expected in zip(ours(*call), module(*call), strict=True):
                torch.testing.assert_close(actual, expected)
    return ours


@pytest.mark.sampled(12)
@pytest.mark.parametrize("module", [Takes, Makes])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_sizes(name: str, module: type[nn.Module]) -> None:
    agree(module(FUNCTIONS[name]), [(torch.ones(n, 4),) for n in (5, 3, 8, 7)])


@pytest.mark.sampled(12)
@pytest.mark.parametrize("module", [Takes, Makes])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_live_numbers(name: str, module: type[nn.Module]) -> None:
    agree(module(FUNCTIONS[name]), [(torch.ones(2, 4), n) for n in (5, 3, 8, 7)])


@pytest.mark.filterwarnings("ignore:.*runs in")
@pytest.mark.parametrize("name", MADE)
def test_tensors_of_what_numpy_makes_of_sizes(name: str) -> None:
    agree(MakesAtOnce(MADE[name]), [(torch.ones(n, 4),) for n in (5, 3, 8, 7)])


@pytest.mark.parametrize("name", ["math.pow", "np.ceil", "max with a smaller float"])
def test_functions_that_graphs_follow(name: str) -> None:
    calls = [(torch.ones(2, 4), n) for n in (5, 3, 4, 2, 6)]
    ours = agree(Takes(FUNCTIONS[name]), calls)
    assert len(ours.report().captures) == 2  # the second value makes it an input
    assert not any(record.fallback for record in ours.report().captures)


@pytest.mark.filterwarnings("ignore:.*runs in")
def test_numbers_of_numpy_among_results() -> None:
    class Returns(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * 2, np.multiply(x.shape[0], 2), np.ceil(x.shape[0] / 2)

    ours = ORTModule(Returns())
    for n in (5, 3, 8):
        assert [type(each) for each in ours(torch.ones(n, 4))[1:]] == [np.int64, np.float64]


class Larger(nn.Module):
    """Python's choice among two results."""

    def __init__(self, choose: Callable[..., Any]) -> None:
        super().__init__()
        self.weight, self.choose = nn.Parameter(torch.tensor([-1.0, -0.5, 0.5, 1.0])), choose

    def forward(self, x: torch.Tensor) -> Any:
        return self.choose((x * self.weight).sum(), (x * self.weight.detach().neg() * 0.5).sum())


@pytest.mark.filterwarnings("ignore:.*runs in")
@pytest.mark.parametrize(
    "choose",
    [max, min, lambda a, b: max([b, a]), lambda a, b: max(a, 0.0), lambda a, b: min(0.0, b * 1)],
    ids=["max", "min", "of a list", "with a number", "number first"],
)
def test_python_chooses_one_of_its_operands(choose: Callable[..., Any]) -> None:
    plain = Larger(choose)
    ours = ORTModule(copy.deepcopy(plain))
    for x in (torch.ones(4), torch.tensor([3.0, 0, 0, 1]), torch.tensor([1.0, 0, 0, 3])):
        expected, actual = plain(x), ours(x)
        assert type(actual) is type(expected)
        torch.testing.assert_close(actual, expected)
        if isinstance(expected, torch.Tensor) and expected.requires_grad:
            expected.backward()
            actual.backward()
            torch.testing.assert_close(ours.weight.grad, plain.weight.grad)
