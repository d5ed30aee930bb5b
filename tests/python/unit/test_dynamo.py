# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""torch.compile with our backend: pieces that Dynamo cuts out run on the engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import dynamo, engine
from ortrain.engine import Engine


class Branching(nn.Module):
    """A branch on a value: no capture of the whole holds for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if h.sum() > 0:
            h = self.second(h) * x.shape[0]
        return self.last(h)


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    made: list[Engine] = []

    class Recorded(Engine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(dynamo, "Engine", Recorded)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


def assert_same_steps(compiled: Any, ours: nn.Module, plain: nn.Module, inputs: list[Any]) -> None:
    for x in inputs:
        expected, actual = plain(x), compiled(x)
        torch.testing.assert_close(actual, expected)
        expected.square().sum().backward()
        actual.square().sum().backward()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def records(engines: list[Engine]) -> list[Any]:
    return [record for engine in engines for record in engine.records]


def test_a_branch_cuts_the_module_in_native_pieces(engines: list[Engine]) -> None:
    plain = Branching()
    ours = copy.deepcopy(plain)
    compiled = torch.compile(ours, backend=dynamo.backend)
    batch = torch.randn(6, 4)
    assert_same_steps(compiled, ours, plain, [batch, -batch, batch + 1, batch])
    assert len(engines) >= 2
    assert all(not record.fallback and record.native_nodes for record in records(engines))


def test_sizes_vary_without_another_graph(engines: list[Engine]) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Flatten(0), nn.Unflatten(0, (-1, 8)))
    ours = copy.deepcopy(plain)
    compiled = torch.compile(ours, backend=dynamo.backend, dynamic=True)
    assert_same_steps(compiled, ours, plain, [torch.randn(rows, 4) for rows in (6, 9, 3, 17)])
    assert len(engines) == 1 and len(engines[0].records) == 1


def test_buffers_are_updated(engines: list[Engine]) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
    ours = copy.deepcopy(plain)
    compiled = torch.compile(ours, backend=dynamo.backend)
    assert_same_steps(compiled, ours, plain, [torch.randn(6, 4) for _ in range(3)])
    torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))
    assert all(not record.fallback for record in records(engines))


def test_without_gradients(engines: list[Engine]) -> None:
    module = Branching().eval()
    compiled = torch.compile(module, backend=dynamo.backend)
    x = torch.randn(6, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), module(x))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -100 * gradient


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch:RuntimeWarning")
def test_functions_keep_their_backward() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return Reversed.apply(x) + w * x

    compiled = torch.compile(function, backend=dynamo.backend)
    gradients = []
    for each in (function, compiled):
        x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        each(x, w).sum().backward()
        gradients.append((x.grad, w.grad))
    torch.testing.assert_close(gradients[1], gradients[0])


def test_views_reach_across_a_cut() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        v = h[0]
        torch._dynamo.graph_break()
        v.add_(1)
        return h

    def reading(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        v = h[0]
        torch._dynamo.graph_break()
        v.add_(1)
        return h * 3 + v

    for each in (function, reading):
        x = torch.randn(3, 2)
        torch.testing.assert_close(torch.compile(each, backend=dynamo.backend)(x), each(x))


def test_options_are_refused() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend=dynamo.backend, options={"fast": True})
    with pytest.raises(Exception, match="takes no options, got fast"):
        compiled(torch.randn(1, 2))


def test_the_backend_has_a_name() -> None:
    assert "ortrain" in torch._dynamo.list_backends(exclude_tags=())
    compiled = torch.compile(nn.Linear(2, 2), backend="ortrain")
    assert compiled(torch.randn(3, 2)).shape == (3, 2)


@pytest.mark.since_torch(2, 12)
def test_pieces_of_fixed_sizes_are_captured_for_these(monkeypatch):
    seen = []
    whole = engine.prepare

    def prepare(*args, dynamic, **kwargs):
        seen.append(dynamic)
        return whole(*args, dynamic=dynamic, **kwargs)

    monkeypatch.setattr(engine, "prepare", prepare)
    function = torch.compile(lambda x: (x.sigmoid() * 2).sum(0), backend="ortrain")
    for rows in (3, 5, 7, 9):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(function(x), (x.sigmoid() * 2).sum(0))
    assert seen == [False, True]  # Dynamo lets a size vary once it has varied
