# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Forwards that draw NumPy's random numbers, in pieces: the numbers, and the generator behind them, are PyTorch's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ortrain import ORTModule


def seeded() -> Any:
    np.random.seed(0)
    return np.random.rand()


def shuffled() -> Any:
    order = np.arange(8)
    np.random.shuffle(order)
    return float(order[0])


def set_back() -> Any:
    state = np.random.get_state()
    first = np.random.rand()
    np.random.set_state(state)
    return first + 2 * np.random.rand()


DRAWS: dict[str, Callable[[], Any]] = {
    "seed": seeded,
    "shuffle": shuffled,
    "set_state": set_back,
    "item": lambda: np.random.rand(1).item(),
    "array": lambda: torch.from_numpy(np.random.normal(0, 1, (4,))).float(),
    "integers": lambda: np.random.randint(0, 9, (4,))[2],
    "choice": lambda: np.random.choice(np.arange(8), 3, replace=False)[1],
    "permutation": lambda: np.random.permutation(8)[0],
    "uniform": lambda: np.random.uniform(1, 2),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_in_pieces_numpy_draws_what_it_does(draw: Callable[[], Any]) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x) * draw())

    torch.manual_seed(0)
    plain = Draws()
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(3, 4)
    for call in range(3):
        results = []
        for model in (plain, ours):
            np.random.seed(7 + call)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                y = model(x)
            results.append((y, np.random.rand()))
        assert results[0][1] == results[1][1]
        torch.testing.assert_close(results[1][0], results[0][0])
    assert "NumPy's random numbers" in ours.report().captures[0].fallback
