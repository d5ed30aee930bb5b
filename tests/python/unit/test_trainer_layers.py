# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainer with layers whose sizes the graph knows as products of others only."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ortrain import ORTTrainer, ORTTrainerOptions, optim

_DESCRIPTION = {
    "inputs": [("x", ["batch", 3, 6, 6]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("scores", ["batch", 4])],
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clips", [True, False])
def test_flattened_images_train_as_in_pytorch(clips: bool, accumulation: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 4)
    )
    plain = copy.deepcopy(model)
    options = {
        "batch": {"gradient_accumulation_steps": accumulation},
        "utils": {"grad_norm_clip": clips},
    }
    config = optim.SGDConfig(lr=0.1)
    trainer = ORTTrainer(
        model, _DESCRIPTION, config, nn.CrossEntropyLoss(), ORTTrainerOptions(options)
    )
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(4):
        x, label = torch.randn(5 - step // 2, 3, 6, 6), torch.randint(0, 4, (5 - step // 2,))
        loss, _ = trainer.train_step(x, label)
        expected = nn.functional.cross_entropy(plain(x), label)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        (expected / accumulation).backward()
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("config", [optim.AdamConfig(lr=0.01), optim.LambConfig(lr=0.01)])
def test_optimizers_with_states_take_such_layers(config: object) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.Tanh(), nn.Linear(8, 4))
    trainer = ORTTrainer(model, _DESCRIPTION, config, nn.CrossEntropyLoss())
    x, label = torch.randn(8, 3, 6, 6), torch.randint(0, 4, (8,))
    losses = [float(trainer.train_step(x, label)[0]) for _ in range(10)]
    assert losses[-1] < losses[0]
