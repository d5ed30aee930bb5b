# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Forwards that compare a draw with a number: a graph where no draw could decide otherwise, PyTorch else."""

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    """Return a draw below 0."""
    drawn = torch.rand(1)
    drawn.view(-1).neg_()
    return drawn


def overwritten(x: torch.Tensor) -> torch.Tensor:
    """Return a number below 0."""
    drawn = torch.rand([])
    torch.sub(drawn, 2, out=drawn)
    return drawn


class Dropping(nn.Module):
    """Leaves out a layer where a draw is on one side of a bound."""

    def __init__(
        self, compare: Callable[[Any, Any], Any], bound: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 4)
        self.compare, self.bound, self.dtype = compare, bound, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and self.compare(torch.rand([], dtype=self.dtype), self.bound):
                continue
            x = torch.tanh(layer(x))
        return self.last(x)


def run(model: nn.Module, calls: int = 4) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    results = [model(x) for _ in range(calls)]
    sum(r.sum() for r in results).backward()
    return results, torch.get_rng_state()


def followed(
    compare: Callable[[Any, Any], Any], bound: float, dtype: torch.dtype = torch.float32
) -> bool:
    """Compare with PyTorch, the generator too; tell whether it was a graph."""
    plain = Dropping(compare, bound, dtype)
    ours = ORTModule(copy.deepcopy(plain))
    (expected, state), (found, after) = run(plain), run(ours)
    torch.testing.assert_close(found, expected)
    assert torch.equal(state, after)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)
    return not any(record.fallback for record in ours.report().captures)


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
@pytest.mark.parametrize("bound", [-1, -0.5, 1.0, 3])
def test_bounds_that_no_draw_passes(compare: Callable[[Any, Any], Any], bound: float) -> None:
    assert followed(compare, bound)


def test_at_zero_two_comparisons_depend_on_the_draw() -> None:
    assert followed(operator.lt, 0.0) and followed(operator.ge, 0.0)
    assert not followed(operator.le, 0.0) and not followed(operator.gt, 0.0)


@pytest.mark.parametrize("bound", [0.5, 1e-9, -1e-9, 0.9999999])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bounds_that_draws_may_pass(bound: float) -> None:
    assert not followed(operator.lt, bound)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_types_whose_draws_are_rounded() -> None:
    assert not followed(operator.lt, 0.0, torch.bfloat16)
    assert followed(operator.lt, 0.0, torch.float64)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_rate_that_is_set_later_counts() -> None:
    plain = Dropping(operator.lt, 0.0, torch.float32)
    ours = ORTModule(copy.deepcopy(plain))
    run(plain), run(ours)
    plain.bound = ours.bound = 0.6
    (expected, state), (found, after) = run(plain, 8), run(ours, 8)
    torch.testing.assert_close(found, expected)
    assert torch.equal(state, after)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_that_are_no_draws() -> None:
    class Asks(nn.Module):
        def __init__(self, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.layer, self.made = nn.Linear(4, 4), made

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if self.made(x) < 0 else -self.layer(x)

    makes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.mean(),
        lambda x: torch.randn([]),
        lambda x: torch.rand([]) - 0.5,
        lambda x: torch.rand([]).uniform_(-1, 0),
        lambda x: torch.rand([]).neg_(),
        written_through_a_view,
        overwritten,
    ]
    for made in makes:
        plain = Asks(made)
        ours = ORTModule(copy.deepcopy(plain))
        (expected, state), (found, after) = run(plain), run(ours)
        torch.testing.assert_close(found, expected)
        assert torch.equal(state, after)


class Sized(nn.Module):
    """Asks about draws of as many elements as ``sizes`` gives."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.draw(x) < 0.0 else self.layer(x)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(2),
        lambda x: torch.rand(0),
        lambda x: torch.rand(x.shape[0]),
        lambda x: torch.rand(x.shape[0], 1),
        lambda x: torch.rand_like(x[:, 0]),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_draws_of_no_single_number_raise_as_in_pytorch(
    draw: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    plain = Sized(draw)
    ours = ORTModule(copy.deepcopy(plain))
    for rows in (1, 2):
        x = torch.ones(rows, 4)
        try:
            expected = plain(x)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="ambiguous"):
                ours(x)
        else:
            torch.testing.assert_close(ours(x), expected)


def test_draws_of_one_number_in_axes() -> None:
    ours = ORTModule(Sized(lambda x: torch.rand(1, 1)))
    torch.testing.assert_close(ours(torch.ones(2, 4)), ours.layer(torch.ones(2, 4)))
    assert not ours.report().captures[0].fallback


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_comparisons_that_are_written_to() -> None:
    class Written(nn.Module):
        def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
            super().__init__()
            self.layer, self.write = nn.Linear(4, 4), write

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            below = torch.rand([]) < 0
            self.write(below)
            return x if below else self.layer(x)

    writes: list[Callable[[torch.Tensor], Any]] = [
        lambda b: b.logical_not_(),
        lambda b: b.view(-1).fill_(True),
        lambda b: b.data.fill_(True),
    ]
    for write in writes:
        ours = ORTModule(Written(write))
        x = torch.ones(2, 4)
        assert torch.equal(ours(x), x)
        assert ours.report().captures[0].fallback
