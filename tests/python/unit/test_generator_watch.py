# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Forwards that draw Python's or NumPy's random numbers are not traced with symbols to their end."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture import export
from ortrain.capture.errors import CaptureError
from ortrain.capture.generator_watch import GeneratorsUsedError, GeneratorWatch
from ortrain.capture.names_read import NamesRead


class Deep(nn.Module):
    """Draws by a function and goes through some layers."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.draw = draw
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.draw()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Caught(Deep):
    """Goes another way where a layer fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x)
        except GeneratorsUsedError:
            return x * 0


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list of the traces: how free their sizes are, how many tensors came up."""
    seen: list[tuple[str, int]] = []
    trace = export._capture

    def note(*args: Any, **kwargs: Any) -> Any:
        read = next(a for a in args if isinstance(a, NamesRead))
        before = len(read.fakes._made)
        try:
            return trace(*args, **kwargs)
        finally:
            seen.append((args[-1].name, len(read.fakes._made) - before))

    monkeypatch.setattr(export, "_capture", note)
    return seen


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
@pytest.mark.parametrize("kind", [Deep, Caught])
def test_a_trace_with_symbols_ends_where_random_numbers_are_drawn(
    kind: type[Deep], draw: Callable[[], float], traces: list[tuple[str, int]]
) -> None:
    state = random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
    with pytest.raises(CaptureError, match="draws (Python|NumPy)'s random numbers"):
        export.capture(kind(draw), (torch.ones(2, 4),))
    assert state == (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2])
    (first, few), (second, many) = traces
    assert (first, second) == ("ALL", "NONE")
    assert few < 20 < 60 < many


def test_a_forward_that_sets_generators_back_is_one_graph_of_all_sizes(
    traces: list[tuple[str, int]],
) -> None:
    class Midway(Deep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            python = random.getstate()
            random.seed(3)
            x = super().forward(x)
            random.setstate(python)
            return x

    plain = Midway(random.random)
    ours = ORTModule(copy.deepcopy(plain))
    for rows in (2, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(ours(x), plain(x))
    assert [freedom for freedom, _ in traces] == ["ALL", "NONE", "ALL"]
    report = ours.report()
    assert len(report.captures) == 1 and not report.captures[0].fallback


def test_nothing_drawn_ends_nothing() -> None:
    watch = GeneratorWatch()
    for _ in range(100):
        watch.look()
    torch.rand(3)
    np.random.default_rng(0).random()
    for _ in range(100):
        watch.look()
    assert not watch.has_ended


def test_generators_of_numpy_may_be_of_another_kind() -> None:
    kept = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        watch = GeneratorWatch()
        for _ in range(100):
            watch.look()
        np.random.rand()
        with pytest.raises(GeneratorsUsedError):
            for _ in range(100):
                watch.look()
    finally:
        np.random.set_bit_generator(kept)
