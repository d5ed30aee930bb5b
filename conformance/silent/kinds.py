# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers of Python and NumPy in a forward that changes something: their kinds, signs, ties and orders."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from conformance.silent.program import Session, program

GAIN = np.float64(1.5)


class Counting(nn.Module):
    """Counts its calls and applies a function to itself and the output of a layer."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        self.calls, self.integers = 0, np.arange(4)

    def forward(self, x: torch.Tensor) -> Any:
        """Return what the function returns."""
        self.calls += 1
        return self.function(self, self.layer(x).exp())


class Sized(nn.Module):
    """Applies a function to the number of rows; makes tensors of what it gives."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the output of a layer scaled, and integers scaled."""
        number = self.function(x.shape[0])
        filled = torch.full((4,), number)
        filled[0] = 0.75
        return self.layer(x) * filled, torch.arange(4) * number


def _counted(s: Session, *functions: Callable[[Any, torch.Tensor], Any]) -> None:
    for function in functions:
        model = s.wrap(Counting(function))
        for _ in range(4):
            s.train(model, s.leaf(3, 4))


@program()
def powers_of_negative_numbers(s: Session) -> None:
    """As text, -1 ** k is minus the power of 1."""
    _counted(
        s,
        lambda m, x: x * (-1) ** torch.arange(4),
        lambda m, x: x * (-0.5) ** torch.arange(4) * (-1) ** m.calls,
        lambda m, x: x * (-m.calls) ** torch.arange(4) * (m.calls - 9) ** torch.arange(4),
    )


@program(coarse=torch.float32)
def numpy_divides_integers(s: Session) -> None:
    """Quotients of NumPy's integers are of 64 bits, and its quantiles have no axes."""
    _counted(
        s,
        lambda m, x: x * torch.from_numpy(m.integers / 3),
        lambda m, x: torch.from_numpy(1 / 10000 ** (np.arange(4) / 4)) * x,
        lambda m, x: x * torch.as_tensor(np.quantile(m.integers, 0.3)),
        lambda m, x: x * torch.from_numpy(np.bincount(x.detach().argmax(1).numpy(), minlength=4)),
    )


@program()
def a_float_of_numpy_among_integers(s: Session) -> None:
    """One of NumPy's floats is a number, no tensor of 64 bits."""
    _counted(
        s,
        lambda m, x: (torch.arange(4) * GAIN, x * GAIN),
        lambda m, x: (torch.arange(4) * np.ceil(m.calls / 2), x),
        lambda m, x: x * (2 if isinstance(np.float64(1) * m.calls, float) else 3),
    )


@program()
def functions_of_sizes(s: Session) -> None:
    """Python's max gives one of its operands, math.pow and NumPy's ceil give floats."""
    for function in (
        lambda n: max(n, 1.0),
        lambda n: max(n, 6.5),
        lambda n: min([n, 6.5]),
        lambda n: math.pow(n, 2),
        lambda n: math.pow(n, 30),
        lambda n: np.ceil(n / 2),
        lambda n: np.maximum(n, 2.5),
    ):
        model = s.wrap(Sized(function))
        for rows in (5, 3, 8, 7):
            s.train(model, s.leaf(rows, 4))


@program()
def the_larger_of_two_results(s: Session) -> None:
    """Python's max of two tensors is one of them, which alone gets the gradient at a tie."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([-1.0, -0.5, 0.5, 1.0]))

        def forward(self, x: torch.Tensor) -> Any:
            first, second = (x * self.weight).sum(), (x * x * self.weight).sum()
            return max(first, second), min([second, first])

    model = s.wrap(Net())
    for x in (torch.ones(4), torch.tensor([3.0, 0, 0, 1]), torch.tensor([0.5, 0, 0, 2])):
        s.train(model, x)
    _counted(
        s,
        lambda m, x: max(x.sum() * 0, x.mean() * 0) + m.layer.bias,
        lambda m, x: x * (2 if type(max(0.5, x.min() * 0)) is float else 3),
    )


@program()
def order_of_a_set(s: Session) -> None:
    """Python goes through a set of integers by their hashes, not as they came."""
    _counted(
        s,
        lambda m, x: [x[i % 3] * (1 + i) for i in {9, 1, m.calls % 3 + 4}],
        lambda m, x: [x[i % 3] * (1 + i) for i in {v % 5 for v in (9, 3, m.calls)}],
        lambda m, x: x[0] * list({17, 8, m.calls + 1})[0],
    )


@program()
def gradients_where_there_is_no_logit(s: Session) -> None:
    """Where a probability is none the gradient of its logit is none either, even if nobody sees the value."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.3, 1.5, -0.2, 0.0, 1.0]))

        def forward(self) -> tuple[torch.Tensor, ...]:
            return torch.logit(self.weight).nansum(), torch.logit(self.weight, 1e-3)

    model = s.wrap(Net())
    for _ in range(2):
        s.train(model)


def _stepping(model: Any, y: torch.Tensor) -> torch.Tensor:
    type(model).steps += 1
    return y * model.steps


@program()
def a_number_of_the_class_that_an_object_asks_for(s: Session) -> None:
    """A rate that warms up, kept by the class."""
    model = Counting(_stepping)
    model.__class__ = type("Warming", (Counting,), {"steps": 0})
    wrapped = s.wrap(model)
    for _ in range(4):
        s.train(wrapped, s.leaf(3, 4))


def _calls_counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        call.calls += 1  # type: ignore[attr-defined]
        return function(*args) * call.calls  # type: ignore[attr-defined]

    call.calls = 0  # type: ignore[attr-defined]
    return call


@program()
def a_decorator_that_counts(s: Session) -> None:
    """The count is an attribute of the function."""
    model = s.wrap(Decorated())
    for _ in range(4):
        s.train(model, s.leaf(3, 4))


class Decorated(nn.Module):
    """Scales by how often a function has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), _calls_counted(torch.sigmoid)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the activation."""
        return self.act(self.layer(x))


class Positions(nn.Module):
    """The usual formula of encoded positions, in one expression."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of a layer, and frequencies in NumPy's dtype."""
        frequencies = torch.arange(4) * torch.tensor([np.log(1e4) / x.shape[0]] * 4)
        return self.layer(x) * frequencies.to(x.dtype).sin(), frequencies


@program(coarse=torch.float32)
def a_tensor_of_what_numpy_makes_of_a_size(s: Session) -> None:
    """It has NumPy's dtype."""
    model = s.wrap(Positions())
    for rows in (3, 5, 4, 7):
        s.train(model, s.leaf(rows, 4))
