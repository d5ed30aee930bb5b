# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Values and types of operands that PyTorch refuses, and the engine's kernels would compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortrain import ORTModule


class Entropy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.full((2, 2), 0.5))

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(self.level, target)


@pytest.mark.filterwarnings("ignore")
def test_probabilities_lie_between_0_and_1() -> None:
    ours = ORTModule(Entropy())
    ours(torch.ones(2, 2)).backward()
    torch.testing.assert_close(ours.level.grad, torch.full((2, 2), -0.5))
    for level, goal, name in (
        *((1.5, 1, "input"), (-0.5, 1, "input"), (float("nan"), 1, "input")),
        *((0.5, 2, "target"), (0.5, -1, "target"), (0.5, float("nan"), "target")),
    ):
        with torch.no_grad():
            ours.level[1, 0] = level
        target = torch.ones(2, 2)
        target[0, 1] = goal
        with pytest.raises(RuntimeError, match=f"all elements of {name} should be between 0 and 1"):
            ours(target)
    for level, goal in ((0.0, 0.0), (1.0, 1.0), (1.0, 0.0)):
        with torch.no_grad():
            ours.level.fill_(level)
        target = torch.full((2, 2), goal)
        torch.testing.assert_close(ours(target), F.binary_cross_entropy(ours.level, target))


class Calls(nn.Module):
    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


W = torch.ones(8)
TYPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm, double weights": lambda x: F.layer_norm(x, (8,), W.double()),
    "layer norm, double input": lambda x: F.layer_norm(x.double(), (8,), W),
    "layer norm, two halves": lambda x: F.layer_norm(x.bfloat16(), (8,), W.half()),
    "layer norm, float weights": lambda x: F.layer_norm(x.bfloat16(), (8,), W),
    "batch norm": lambda x: F.batch_norm(x, None, None, W[:5].bfloat16(), training=True),
    "batch norm, statistics": lambda x: F.batch_norm(x.half(), W[:5], W[:5], W[:5].half()),
    "group norm": lambda x: F.group_norm(x, 5, W[:5].double()),
    "index_copy": lambda x: x.index_copy(0, torch.tensor([0]), x[:1].double()),
    "index_add": lambda x: x.index_add(0, torch.tensor([0]), x[:1].double()),
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_types_that_pytorch_refuses(name: str) -> None:
    seen = []
    for run in (Calls(TYPES[name]), ORTModule(Calls(TYPES[name]))):
        try:
            seen.append(run(torch.ones(3, 5, 8)).dtype)
        except RuntimeError as error:
            seen.append(str(error).partition("\n")[0])
    assert seen[0] == seen[1]
