# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Results that the caller writes to before a backward which reads them in PyTorch, or does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule


class Net(nn.Module):
    def __init__(self, function: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, self.linear(x))


FUNCTIONS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "sigmoid": lambda m, y: y.sigmoid(),
    "softmax": lambda m, y: y.softmax(1),
    "relu in place": lambda m, y: y.relu_(),
    "exp": lambda m, y: y.exp(),
    "number": lambda m, y: y * 3,
    "sum": lambda m, y: y + m.scale,
    "read by the next": lambda m, y: (y, y * m.scale),
    "not read by the next": lambda m, y: (y, y * torch.arange(4.0)),
    "read by the next layer": lambda m, y: (y, m.linear(y)),
    "read by another branch": lambda m, y: (y, y.tanh() * 0 + 1),
    "view": lambda m, y: y.sigmoid().view(2, 6),
    "row of it": lambda m, y: y.tanh()[0],
    "detached": lambda m, y: (y.detach(), y * m.scale),
    "without gradient": lambda m, y: (y.detach().clone(), y * m.scale),
    "checkpoint": lambda m, y: checkpoint(lambda t: m.linear(t).sigmoid(), y, use_reentrant=False),
    "indices": lambda m, y: y.max(1),
}


def outcome(model: Any, write: int, start: int) -> Any:
    model.zero_grad()
    result = model(torch.linspace(-1, 1, 12).reshape(3, 4))
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    results[write % len(results)].add_(1)
    root = results[start % len(results)]
    if not root.requires_grad:
        return None
    try:
        root.sum().backward()
    except RuntimeError:
        return "RuntimeError"
    return [p.grad for p in model.parameters()]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize(("write", "start"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_backward_raises_where_pytorch_does(name: str, write: int, start: int) -> None:
    plain, wrapped = Net(FUNCTIONS[name]), ORTModule(Net(FUNCTIONS[name]))
    for _ in range(2):
        expected, actual = outcome(plain, write, start), outcome(wrapped, write, start)
        if isinstance(expected, list):
            for mine, theirs in zip(actual, expected, strict=True):
                torch.testing.assert_close(mine, theirs)
        else:
            assert actual == expected
