# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Results that are their operands, or show memory more than once, and are written to or returned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortrain import ORTModule


def _plus_one(result: torch.Tensor) -> torch.Tensor:
    result += 1
    return result


def _dropped(m: Model, x: torch.Tensor) -> Any:
    h = x * m.w
    k = _plus_one(m.drop(h))
    return h * k


def _unsafe(m: Model, x: torch.Tensor) -> Any:
    h = x * m.w
    _plus_one(h.unsafe_chunk(2, 1)[1])
    return h * 2


def _region(m: Model, x: torch.Tensor) -> Any:
    h = x * m.w
    with torch.no_grad():
        m.drop(h).mul_(2)
    return h * 2


def _expanded(write: Callable[[torch.Tensor], Any]) -> Callable[[Model, torch.Tensor], Any]:
    def forward(m: Model, x: torch.Tensor) -> Any:
        y = x[:1] * 2
        wide = y.expand(3, 4)
        write(wide)
        return wide * m.w + y

    return forward


def _zeroed_buffer(m: Model, x: torch.Tensor) -> Any:
    m.b.expand(3, 4).zero_()
    return x * m.w + m.b


class Model(nn.Module):
    def __init__(self, run: Callable[[Model, torch.Tensor], Any], rate: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 4))
        self.drop = nn.Dropout(rate)
        self.register_buffer("b", torch.arange(4.0))
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


CASES: dict[str, Callable[[Model, torch.Tensor], Any]] = {
    "dropout": _dropped,
    "dropout of an argument": lambda m, x: _plus_one(m.drop(x)) * m.w,
    "two dropouts": lambda m, x: _plus_one(m.drop(m.drop(x))) * m.w,
    "dropout in a region": _region,
    "a returned dropout": lambda m, x: (m.drop(x), x * m.w),
    "type_as": lambda m, x: _plus_one(x.type_as(m.w)) * m.w,
    "unsafe_chunk": _unsafe,
    "a diagonal": lambda m, x: (torch.einsum("ii->i", x[:, :3]).mul_(2), F.linear(x, m.w))[1],
    "masked expansion": _expanded(lambda t: t.masked_fill_(torch.eye(3, 4, dtype=torch.bool), 2.0)),
    "filled expansion": _expanded(lambda t: t.fill_(2.0)),
    "rows of an expansion": _expanded(lambda t: t.index_fill_(1, torch.tensor([0]), 7.0)),
    "an expanded buffer": _zeroed_buffer,
}


@pytest.mark.parametrize("case", CASES)
def test_memory_is_that_of_pytorch(case: str) -> None:
    for module in (Model(CASES[case], 0.0), Model(CASES[case], 0.5).eval()):
        plain, ours = module, ORTModule(copy.deepcopy(module))
        for _ in range(2):
            seen = []
            for run in (plain, ours):
                x = torch.linspace(-1, 1, 12).reshape(3, 4)
                results = run(x)
                results = results if isinstance(results, tuple) else (results,)
                run.zero_grad()
                results[-1].sin().sum().backward()
                seen.append([*results, x, run.b, run.w.grad])
                assert (results[0] is x) == (case == "a returned dropout")
            for theirs, mine in zip(*seen, strict=True):
                torch.testing.assert_close(mine, theirs)


def test_dropout_that_nobody_writes_to_stays_in_a_graph() -> None:
    ours = ORTModule(Model(lambda m, x: m.drop(x * m.w) * 2, 0.5).eval())
    ours(torch.ones(3, 4))
    assert [record.fallback for record in ours.report().captures] == [""]
