# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Option 'graph_transformer.transformer_layer_recompute': layers are computed again in the backward."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTTrainer, ORTTrainerOptions, optim

LAYERS = 4


class LanguageModel(nn.Module):
    """An encoder with dropout, between an embedding and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 64, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(16, 30)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.encoder(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def trained(
    options: dict[str, Any], steps: int = 3
) -> tuple[list[float], list[torch.Tensor], ORTTrainer]:
    """Return the losses of some steps, the weights behind them and the trainer."""
    torch.manual_seed(0)
    model = LanguageModel()
    size = ["batch", "seq"]
    description = {"inputs": [("x", size), ("y", size)], "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(
        model,
        description,
        optim.AdamConfig(lr=1e-2),
        options=ORTTrainerOptions({"graph_transformer": options}),
    )
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 30, (4, 32), generator=draw)
        losses.append(trainer.train_step(x, x.roll(1, 1)).item())
    return losses, [p.detach().clone() for p in model.parameters()], trainer


def test_layers_are_computed_again() -> None:
    losses, weights, plain = trained({})
    kept = plain.engine.memory_plan["arena_bytes"]
    fewer = {}
    for count in (0, 1, 2, LAYERS):
        given = {"transformer_layer_recompute": True, "number_recompute_layers": count}
        again, others, trainer = trained(given)
        assert again == losses  # the same masks of dropout, too
        torch.testing.assert_close(others, weights, rtol=0, atol=0)
        fewer[count] = trainer.engine.memory_plan["arena_bytes"]
    assert fewer[0] < fewer[2] < fewer[1] < kept
    assert fewer[0] < 0.6 * kept


def test_the_number_alone_does_nothing() -> None:
    plan = trained({}, 1)[2].engine.memory_plan
    assert trained({"number_recompute_layers": 2}, 1)[2].engine.memory_plan == plan


def test_the_log_says_how_many_layers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ortrain"):
        trained({"transformer_layer_recompute": True}, 1)
    assert f"{LAYERS - 1} layers are computed again" in caplog.text
    caplog.clear()
    trainer = ORTTrainer(
        Perceptron(),
        {"inputs": [("x", [4, 8])], "outputs": [("loss", [], True)]},
        optim.SGDConfig(),
        options=ORTTrainerOptions({"graph_transformer": {"transformer_layer_recompute": True}}),
    )
    trainer.train_step(torch.ones(4, 8))
    (told,) = [r for r in caplog.records if "computed again" in r.getMessage()]
    assert told.levelno == logging.WARNING
    assert "0 layers" in told.getMessage()
