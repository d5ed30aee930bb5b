# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules that are called in many ways by turns: captures come to an end, and what is told is told once."""

from __future__ import annotations

import collections
import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule

KINDS = 20  # more than graphs are kept


class Tasks(nn.Module):
    """A layer for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({f"task{i}": nn.Linear(4, 4) for i in range(KINDS)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.heads[task](x).square().mean()


def captures_in(rounds: int, wrapped: ORTModule, plain: nn.Module) -> int:
    known = len(wrapped.report().captures)
    for _ in range(rounds):
        for i in (kind // 2 for kind in range(2 * KINDS)):  # in a row each is for ever new
            x = torch.randn(2, 4)
            results = [module(x, f"task{i}") for module in (wrapped, plain)]
            for result in results:
                result.backward()
            torch.testing.assert_close(*results)
    made = [record for record in wrapped.report().captures[known:] if not record.fallback]
    return len(made)


def test_more_kinds_than_graphs_take_turns_without_a_capture_each() -> None:
    plain = Tasks()
    wrapped = ORTModule(copy.deepcopy(plain))
    with pytest.warns(RuntimeWarning, match="more kinds take turns than graphs are kept") as told:
        assert captures_in(1, wrapped, plain) == 17
        assert captures_in(6, wrapped, plain) == 0
    assert len(told) == 1
    assert captures_in(5, wrapped, plain) == 1  # one for each 256 calls
    for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_kind_that_comes_to_stay_gets_its_graph() -> None:
    plain = Tasks()
    wrapped = ORTModule(copy.deepcopy(plain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captures_in(1, wrapped, plain)
        for _ in range(300):
            wrapped(torch.randn(2, 4), "task19")
    assert wrapped.report().captures[-1].fallback == ""


def test_strict_mode_captures_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    plain = Tasks()
    assert captures_in(1, ORTModule(copy.deepcopy(plain)), plain) == KINDS


class Reverse(torch.autograd.Function):
    """Gradients the other way round (Ganin et al. 2016)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return -ctx.scale * gradient, None


class Adversarial(nn.Module):
    """Two results, one of them behind a reversal."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.classes, self.domains = (
            nn.Linear(5, 6),
            nn.Linear(6, 2),
            nn.Linear(6, 2),
        )

    def forward(self, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.features(x).relu()
        return self.classes(y), self.domains(Reverse.apply(y, scale))


class Experts(nn.Module):
    """Rows that are chosen by their values, and a loss that is kept on the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(5, 3)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, _: float) -> tuple[torch.Tensor, torch.Tensor]:
        shares = self.router(x).softmax(-1)
        weight, chosen = shares.max(-1)
        self.loss = shares.mean(0).square().sum()
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            if rows.numel():
                y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return y, self.loss


@pytest.mark.parametrize("kind", [Adversarial, Experts])
def test_each_cause_is_told_once(kind: type[nn.Module]) -> None:
    plain = kind()
    wrapped = ORTModule(copy.deepcopy(plain))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(12):
            x, scale = torch.randn(4, 5), step / 10 + 0.05
            for module in (wrapped, plain):
                a, b = module(x, scale)
                (a.square().mean() + b.square().mean()).backward()
    for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    texts = collections.Counter(str(each.message).partition("\n")[0] for each in told)
    assert set(texts.values()) == {1} and len(texts) <= 2
    assert all(text.startswith(kind.__name__) for text in texts)


def test_a_gradient_of_another_shape_does_not_stand_in_the_way() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(5, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.rows(ids).tanh()

    plain = Table()
    wrapped = ORTModule(copy.deepcopy(plain))
    ids = torch.tensor([0, 4, 2])
    for rows in (5, 8):
        more = torch.randn(rows - 5, 3)
        for module in (wrapped, plain):
            weight = module.rows.weight
            # As transformers grows vocabularies; the gradient stays as it was.
            weight.data = torch.cat([weight.data[:5], more])
            result = module(ids % rows)
            module.zero_grad()
            result.sum().backward()
        torch.testing.assert_close(wrapped.rows.weight.grad, plain.rows.weight.grad)
    assert not any(record.fallback for record in wrapped.report().captures)
