# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch takes any byte but 0 of a bool tensor for true; so does what is handed to the engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ortrain import ORTModule, ORTTrainer, _core, optim

ODD = torch.tensor([255, 0, 2, 1], dtype=torch.uint8).view(torch.bool)
PLAIN = torch.tensor([True, False, True, True])


@pytest.mark.parametrize(
    "text",
    [
        "Cast<to = 7>(b)",
        "Cast<to = 1>(b)",
        "Not(b)",
        "Equal(b, bool true)",
        "Xor(b, bool true)",
        "Where(b, float32 2.0, float32 3.0)",
        "And(b, bool true)",
    ],
)
@pytest.mark.parametrize("size", [4, 5000, 4096])
def test_operators(text: str, size: int) -> None:
    graph = _core.Graph.parse(f"graph g (bool[n] b) => (y) {{\ny = {text}\n}}\n")
    odd = torch.zeros(size, dtype=torch.uint8)
    odd[size - 1], odd[size // 2] = 2, 255
    odd = odd.view(torch.bool)
    run = _core.Run(_core.Session(graph))
    assert torch.equal(run.forward([odd])[0], run.forward([odd.clone() != 0])[0])
    assert odd.view(torch.uint8)[size - 1] == 2, "the caller's own stays"


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", PLAIN.clone())

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * mask.float() + self.mask.to(torch.int32)
        return y.sum() / mask.sum() + torch.cumsum(mask, 0).max() + (~mask).sum()


def test_trainers() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", ODD.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * self.mask.float()).sum() / self.mask.sum()

    torch.manual_seed(0)
    model = Loss()
    x = torch.ones(2, 4)
    expected = model(x).item()
    description = {"inputs": [("x", ["b", 4])], "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(model, description, optim.SGDConfig(lr=0.0))
    assert trainer.train_step(x).item() == pytest.approx(expected)
    assert trainer.eval_step(x).item() == pytest.approx(expected)
    assert torch.equal(model.mask, PLAIN)


def test_modules() -> None:
    torch.manual_seed(0)
    model = Masked()
    x = torch.ones(2, 4)
    expected = model(x, PLAIN)
    ours = ORTModule(model)
    assert ours(x, ODD).item() == pytest.approx(expected.item())
    model.mask = ODD.clone()
    assert ours(x, ODD).item() == pytest.approx(expected.item())
    transposed = torch.stack([ODD, ODD]).t()[:, 0]
    assert ours(x, transposed).item() == pytest.approx(expected.item())
