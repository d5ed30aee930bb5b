# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers that vary from call to call are computed as Python computes them, where algebra would simplify."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule

Compute = Callable[[Any], Any]


class Scaled(nn.Module):
    """Adds a number that is computed of an attribute."""

    def __init__(self, compute: Compute, value: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.compute = compute
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 0 + self.compute(self.value)


class Branching(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * 0
        if y.sum() > -1e9:
            y = y + 0
        return y + self.compute(self.value)


def assert_as_python(module: Scaled, values: list[Any]) -> ORTModule:
    wrapped = ORTModule(module)
    x = torch.ones(1, 2)
    for value in values:
        module.value = value
        expected = torch.zeros(1, 2) + module.compute(value)
        torch.testing.assert_close(wrapped(x).detach(), expected, equal_nan=True)
    return wrapped


CASES: dict[str, tuple[Compute, list[Any]]] = {
    "absorbed": (lambda v: v + 1e16 - 1e16, [1.5, 1.75, 2.0, 2.25]),
    "overflowed": (lambda v: v * 1e300 * 1e300 * 1e-300 * 1e-300, [1.0, 2.0, 3.0]),
    "compared": (lambda v: float(v * 1e308 * 10 == float("inf")), [0.5, 1.5, 2.5]),
    "multiplied out": (lambda v: (v - 1.0000001) * 1e16, [1.0000002, 1.0000003, 1.0000004]),
    "cancelled": (lambda v: v - v + 1.0, [1.0, 2.0, float("inf"), 3.0]),
    "nothing but rounding": (
        lambda v: ((v + 1) * (v - 1) - (v * v - 1)) * 1e16,
        [2.0, 1.1, 1.3, 1.7],
    ),
    "rounding, divided": (
        lambda v: ((v + 1) * (v - 1) - (v * v - 1)) / 1e-16,
        [2.0, 1.1, 1.3, 1.7],
    ),
    "sign of a product": (lambda v: math.copysign(1.0, v * -0.0), [2.0, -1.0, 1.5, -3.0]),
    "sign of a quotient": (lambda v: math.copysign(1.0, 0.0 / v), [2.0, -1.0, 1.5, -3.0]),
    "sign of a difference": (lambda v: math.copysign(1.0, -(v - v)), [2.0, -1.0, 1.5]),
    "congruential": (
        lambda n: (n * 6364136223846793005 + 1442695040888963407) % 1000,
        [3, 4, 5, 6],
    ),
    "shifted": (lambda n: (n << 62) % 1000, [3, 4, 5]),
    "raised": (lambda n: (n**40) % 1000, [3, 4, 5]),
}


@pytest.mark.parametrize("kind", [Scaled, Branching])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_numbers_are_pythons(
    name: str, kind: type[Scaled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_PIECES", "all")
    compute, values = CASES[name]
    assert_as_python(kind(compute, values[0]), values)
    torch._dynamo.reset()


def test_plain_arithmetic_stays_one_graph() -> None:
    for compute, values in (
        (lambda v: v * 2 + 1, [1.5, 1.6, 1.7, 1.8]),
        (lambda v: 0.5 * v - 1 + v * v, [1.5, 1.6, 1.7, 1.8]),
        (lambda v: 0.5 * (1.0 + v) + 0.0, [1.5, 1.6, 1.7, 1.8]),
        (lambda v: (1 - v) * 0.9 + v * 0.1, [0.5, 0.6, 0.7, 0.8]),
        (lambda v: 0.5 * (1 - v) - 0.25 * (3 + v), [0.5, 0.6, 0.7, 0.8]),
        (lambda n: (n * 3 + 1) % 5, [3, 4, 5, 6]),
    ):
        wrapped = assert_as_python(Scaled(compute, values[0]), values)
        assert len(wrapped.report().captures) <= 2  # the second has the number as an input


FORMULAS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: 0.5 * (x.shape[0] - 1.0),
    lambda x: x.shape[0] * 0.1 * 3.0,
    lambda x: 2.0 * x.shape[0] ** -0.5 * 3.0,
    lambda x: (x.shape[0] + 1.0) - 1.0,
    lambda x: torch.arange(x.shape[0] * 1.0)[:, None],
    lambda x: x.clamp(max=x.shape[0] + 2**40),
]


@pytest.mark.parametrize("place", range(len(FORMULAS)))
def test_sizes_in_formulas_stay_one_graph(place: int) -> None:
    class Formula(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + FORMULAS[place](x)

    module = Formula()
    wrapped = ORTModule(module)
    for rows in (2, 3, 5, 8, 13):
        x = torch.randn(rows, 2)
        torch.testing.assert_close(wrapped(x), module(x))
    assert len(wrapped.report().captures) <= 2


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_random_arithmetic() -> None:
    draw = random.Random(0)
    constants = [1e16, -1e16, 1e300, 1e-300, 0.1, 3.0, 1.0, -1.0, 1e8]
    for _ in range(12):
        steps = [(draw.choice("+-*"), draw.choice(constants)) for _ in range(4)]

        def compute(v: float, steps: list[tuple[str, float]] = steps) -> float:
            w = v
            for sign, number in steps:
                w = w + number if sign == "+" else w - number if sign == "-" else w * number
            return w

        assert_as_python(Scaled(compute, 1.5), [1.5, 1.75, 2.0])
