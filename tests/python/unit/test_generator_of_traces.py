# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's generator under a trace: what the trace does to it is taken back, what other threads draw is not."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from side_by_side import Linear, assert_same_calls

from ortrain.random_numbers import untouched_generator


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the threads of earlier tests count for nothing."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def test_draws_of_another_thread_stay_drawn() -> None:
    go = threading.Event()

    def draw() -> None:
        go.wait()
        torch.rand(3)

    thread = threading.Thread(target=draw)
    thread.start()
    torch.manual_seed(1)
    with untouched_generator() as touched:
        go.set()
        thread.join()
    assert touched == [False]
    after = torch.get_rng_state()
    torch.manual_seed(1)
    torch.rand(3)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("act", "is_told"),
    [
        (lambda: None, False),
        (lambda: torch.rand(3), True),
        (lambda: torch.manual_seed(1), True),
        (torch.get_rng_state, True),
        (torch.default_generator.seed, True),
    ],
)
def test_what_a_trace_does_is_told_and_taken_back(act: Callable[[], object], is_told: bool) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with untouched_generator() as touched:
        act()
    assert touched == [is_told]
    assert torch.equal(before, torch.get_rng_state())


class SeedsAsItWas(Linear):
    """Seeding anew leaves the state that the seed has given, in which nobody has drawn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.default_generator.manual_seed(3)
        return self.linear(x) + torch.rand(4)


class DrawsInAThread(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(4)))
        thread.start()
        thread.join()
        return self.linear(x) + drawn[0]


@pytest.mark.parametrize("kind", [SeedsAsItWas, DrawsInAThread])
def test_forwards_that_use_the_generator_otherwise_than_by_operators(kind: type[Linear]) -> None:
    assert_same_calls(kind)


@pytest.mark.parametrize("kind", [SeedsAsItWas, DrawsInAThread])
def test_such_forwards_while_another_thread_lives(kind: type[Linear]) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert_same_calls(kind)
    finally:
        end.set()
        thread.join()
