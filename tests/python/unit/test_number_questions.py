# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a forward asks of numbers and sizes, while a graph takes them for any."""

from __future__ import annotations

import copy
import functools
import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule

INTS, FLOATS = (11, 13, 17, 101, 12345), (0.5, 0.75, 3.125, 4.1, 12.0625)


class Asks(nn.Module):
    def __init__(self, ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight, self.ask = nn.Parameter(torch.linspace(-1, 1, 4)), ask

    def forward(self, x: torch.Tensor, n: float | None = None) -> torch.Tensor:
        return x * self.weight * self.ask(x.shape[0] if n is None else n)


def agree(ask: Callable[[Any], Any], calls: Sequence[tuple[Any, ...]]) -> None:
    plain = Asks(ask)
    ours = ORTModule(copy.deepcopy(plain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for call in calls:
            try:
                expected = plain(*call)
            except ArithmeticError as error:
                with pytest.raises((type(error), RuntimeError)):
                    ours(*call)
            else:
                torch.testing.assert_close(ours(*call), expected, equal_nan=True)


def matched(n: Any) -> int:
    match n:
        case int():
            return 2
        case float():
            return 3
    return 4


@functools.singledispatch
def dispatched(n: Any) -> int:
    return 4


@dispatched.register
def _(n: int) -> int:
    return 2


@dispatched.register
def _(n: float) -> int:
    return 3


def handled(n: Any) -> Any:
    try:
        return 2 if n > 14 else 3
    except Exception:
        return 9


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "str": lambda n: len(str(n)),
    "repr": lambda n: len(repr(n)),
    "f-string": lambda n: {"11": 2, "3.125": 3}.get(f"{n}", 5),
    "format": lambda n: len(f"{n:.3f}"),
    "percent": lambda n: len("%s" % n),  # noqa: UP031
    "__class__": lambda n: 2 if n.__class__ is int else 3,
    "type name": lambda n: len(type(n).__name__),
    "isinstance": lambda n: 2 if isinstance(n, int) else 3,
    "abstract class": lambda n: 2 if isinstance(n, numbers.Number) else 3,
    "issubclass": lambda n: 2 if issubclass(n.__class__, float) else 3,
    "match": matched,
    "singledispatch": dispatched,
    "attribute": lambda n: 2 * n.real,
    "power": lambda n: (int(n) ** 50) % 97,
    "round": lambda n: round(n, -1),
    "handled": handled,
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("values", [INTS, FLOATS], ids=["int", "float"])
def test_live_numbers_answer_as_python_does(question: str, values: Sequence[float]) -> None:
    x = torch.linspace(-1, 1, 20).reshape(5, 4)
    agree(QUESTIONS[question], [(x, n) for n in values])


@pytest.mark.sampled(7)
@pytest.mark.parametrize("question", [q for q in QUESTIONS if q != "type name"])
def test_sizes_answer_as_python_does(question: str) -> None:
    agree(QUESTIONS[question], [(torch.ones(n, 4),) for n in (5, 12, 101, 7)])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf, 0.0, -0.0])
@pytest.mark.parametrize(
    "ask",
    [lambda n: n - n, lambda n: n * 0, lambda n: 2 if n != n else 3, lambda n: 1 / n],
    ids=["difference", "product", "comparison", "division"],
)
def test_floats_that_are_no_finite_numbers(ask: Callable[[Any], Any], special: float) -> None:
    x = torch.linspace(-1, 1, 20).reshape(5, 4)
    agree(ask, [(x, n) for n in (11.5, 13.0, special, 0.25)])


def test_divisions_by_zero_raise() -> None:
    x = torch.linspace(-1, 1, 20).reshape(5, 4)
    agree(lambda n: 1.0 / (n - 3), [(x, n) for n in (11, 13, 17, 3, 7)])
    agree(lambda n: 5 % (n - 3), [(x, n) for n in (11, 13, 17, 3, 7)])
    agree(lambda n: 1.0 / (n - 3), [(x, n) for n in (0.5, 0.75, 3.0, 7.0)])
    agree(lambda n: 1.0 / (n - 7), [(torch.ones(n, 4),) for n in (5, 12, 7, 9)])


def test_powers_that_int64_does_not_hold() -> None:
    x = torch.linspace(-1, 1, 20).reshape(5, 4)
    agree(lambda n: (2**n) % 1000003, [(x, n) for n in (11, 13, 62, 70)])
    agree(lambda n: (n**3) % 1009, [(x, n) for n in (11, 13, 2**21, 2**31 - 1)])


@pytest.mark.parametrize("first", [4, 0])
def test_branches_on_emptiness(first: int) -> None:
    for ask in (
        lambda n: 2 if n == 0 else 3,
        lambda n: 2 if n else 3,
        lambda n: 2 if n > 0 else 3,
    ):
        agree(ask, [(torch.ones(n, 4),) for n in (first, 5, 0, 1, 7, 0)])
        shaped = [(torch.ones(n, 4),) for n in (first, 5, 0, 1, 7, 0)]
        agree(lambda n, ask=ask: torch.ones(ask(n), 1, 1), shaped)
