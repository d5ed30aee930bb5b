# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A trace that spends too much on symbolic sizes is taken again with fewer of them."""

from __future__ import annotations

import copy
import logging
from unittest import mock

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F

from ortrain import ORTModule, progress
from ortrain.capture import export, size_arithmetic
from ortrain.capture.errors import SymbolicBudgetError
from ortrain.capture.symbolic_budget import LIMIT, Freedom, SymbolicBudget, freedom_of


class SamePadding(nn.Module):
    """Convolutions that pad by what the size of the image leaves over, as TensorFlow's SAME."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Conv2d(2, 2, 3, stride=2) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            padding: list[int] = []
            for size in (x.shape[3], x.shape[2]):
                missing = max((-(-size // 2) - 1) * 2 + 3 - size, 0)
                padding += [missing // 2, missing - missing // 2]
            x = torch.tanh(layer(F.pad(x, padding)))
        return x.mean((2, 3))


class Counted(nn.Module):
    """A linear layer scaled by the square of a number that an image's size gives, by way of floats."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.fc(x) * (x.shape[1] // 2 + 1) * sum(x.shape[1] // k for k in range(1, 9))
        except SymbolicBudgetError:
            return self.fc(x)


def check(module: nn.Module, ours: ORTModule, x: torch.Tensor) -> None:
    """Compare a step with PyTorch's: result, gradient of the input, gradients of parameters."""
    stock = copy.deepcopy(module)
    theirs, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    module.zero_grad()
    stock.zero_grad()
    expected, actual = stock(theirs), ours(mine)
    torch.testing.assert_close(actual, expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    for own, other in zip(module.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def limited(limit: int) -> mock._patch:
    return mock.patch.object(export, "LIMIT", limit)


def test_within_the_budget_all_sizes_stay_symbols() -> None:
    module = SamePadding()
    ours = ORTModule(module)
    for size in ((2, 2, 17, 20), (3, 2, 23, 18)):
        check(module, ours, torch.randn(size))
    assert freedom_of(module) is Freedom.ALL
    assert all(record.fixed == "" and not record.fallback for record in ours.report().captures)


def test_beyond_it_the_batch_alone_stays_a_symbol(caplog: pytest.LogCaptureFixture) -> None:
    module = SamePadding()
    ours = ORTModule(module)
    notes: list[str] = []
    listening = progress.listen(lambda name, _, state: state == "note" and notes.append(name))
    with limited(1000), caplog.at_level(logging.INFO, logger="ortrain"), listening:
        check(module, ours, torch.randn(2, 2, 17, 20))
        check(module, ours, torch.randn(3, 2, 17, 20))  # another batch fits
        assert len(ours.report().captures) == 1
        check(module, ours, torch.randn(3, 2, 23, 18))
    assert freedom_of(module) is Freedom.FIRST
    records = ours.report().captures
    assert [(r.fixed, r.fallback) for r in records] == [
        ("all sizes but the first of each input", "")
    ] * 2
    assert "(all sizes but the first of each input are fixed)" in str(ours.report())
    first, again = notes
    assert first == (
        "SamePadding: all sizes but the first of each input are fixed from now on, since symbols "
        "for them took more than 1000 terms"
    )
    assert again.startswith("capturing again: sizes")
    assert first in caplog.text


def test_without_any_symbols_each_size_is_a_graph_of_its_own() -> None:
    module = SamePadding()
    ours = ORTModule(module)
    with limited(-1):
        for size in ((2, 2, 17, 20), (3, 2, 17, 20), (2, 2, 17, 20)):
            check(module, ours, torch.randn(size))
    assert [(r.fixed, r.fallback) for r in ours.report().captures] == [("all sizes", "")] * 2


def test_the_same_program_spends_the_same() -> None:
    spent = []
    count = SymbolicBudget._count

    def counted(budget: SymbolicBudget, expression: object) -> None:
        count(budget, expression)
        spent[-1] = budget.spent

    with mock.patch.object(SymbolicBudget, "_count", counted):
        for _ in range(2):
            spent.append(0)
            ORTModule(SamePadding())(torch.randn(2, 2, 17, 20))
    assert spent[0] == spent[1]
    assert 1000 < spent[0] < LIMIT


def test_long_models_of_simple_sizes_spend_next_to_nothing() -> None:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))).double()
    with limited(1000):
        ours = ORTModule(module)
        check(module, ours, torch.randn(2, 5, 4, dtype=torch.float64))
        check(module, ours, torch.randn(3, 6, 4, dtype=torch.float64))
    (record,) = ours.report().captures
    assert record.fixed == "" and not record.fallback


def test_a_forward_that_catches_what_ends_the_trace_is_not_taken_for_captured() -> None:
    module = Counted().double()
    ours = ORTModule(module)
    with limited(0):
        check(module, ours, torch.randn(2, 6, 3, dtype=torch.float64))
    record = ours.report().captures[0]
    assert record.fixed or "may go on in Counted.forward after an error" in record.fallback


def test_only_terms_beyond_the_free_ones_count() -> None:
    budget = SymbolicBudget(5)
    a, b = sympy.symbols("a b", integer=True, positive=True)
    budget._count(a * b + 1)
    assert budget.spent == 0
    long = sum((a**k for k in range(2, 8)), start=sympy.Integer(1))  # a sum of 1 and 6 powers
    with pytest.raises(SymbolicBudgetError, match="more than 5 symbolic terms"):
        budget._count(long)
    assert budget.is_exceeded and budget.spent == 1 + 1 + 6 * 3 - 12


def test_nothing_is_counted_outside_of_a_trace() -> None:
    budget = SymbolicBudget(0)
    init = size_arithmetic.SymNode.__init__
    with budget.counting():
        assert size_arithmetic.SymNode.__init__ is not init
    assert size_arithmetic.SymNode.__init__ is init
