# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Small trainings that several processes, and one alone, make alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ortrain import ORTTrainer, ORTTrainerOptions, optim

FEATURES, CLASSES, ROWS = 6, 4, 24

OPTIMIZERS = {
    "sgd": lambda: optim.SGDConfig(lr=0.1),
    "momentum": lambda: optim.SGDConfig(lr=0.05, momentum=0.9),
    "adam": lambda: optim.AdamConfig(
        [{"params": ["0.bias"], "lambda_coef": 0.0}], lr=0.01, lambda_coef=0.01
    ),
    "adagrad": lambda: optim.AdagradConfig(lr=0.05),
    "lamb": lambda: optim.LambConfig(lr=0.01),
}


def net(*, normed: bool = False, dropout: float = 0.0) -> nn.Module:
    """Return a small network; its first layer holds most of the parameters."""
    layers: list[nn.Module] = [nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES)]
    if normed:
        layers.insert(1, nn.BatchNorm1d(64))
    if dropout:
        layers.insert(-1, nn.Dropout(dropout))
    return nn.Sequential(*layers)


def batch(step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(rows, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


def share(step: int, rank: int, size: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the part of a batch that one of several processes gets."""
    x, label = batch(step, rows)
    return x[rank * rows // size : (rank + 1) * rows // size], label[
        rank * rows // size : (rank + 1) * rows // size
    ]


@dataclasses.dataclass
class Run:
    """What a training gave: a loss per batch, and tensors by name at its end."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    norms: list[float | None] = dataclasses.field(default_factory=list)
    state_bytes: int = 0


def make(
    size: int,
    optimizer: str,
    *,
    seed: int = 1,
    model: dict[str, Any] | None = None,
    batches: int = 1,
    clip: bool = True,
    distributed: dict[str, Any] | None = None,
    **groups: Any,
) -> ORTTrainer:
    """Return a trainer for the process that calls it."""
    torch.manual_seed(seed)
    given = {
        "batch": {"gradient_accumulation_steps": batches},
        "utils": {"grad_norm_clip": clip},
        "distributed": {"world_size": size, **(distributed or {})},
        **groups,
    }
    description = {
        "inputs": [("x", ["batch", FEATURES]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("scores", ["batch", CLASSES])],
    }
    return ORTTrainer(
        net(**(model or {})),
        description,
        OPTIMIZERS[optimizer](),
        nn.CrossEntropyLoss(),
        ORTTrainerOptions(given),
    )


def train(trainer: ORTTrainer, rank: int, size: int, steps: int) -> list[float]:
    """Return the losses of the next batches, of which this process gets its part."""
    losses = []
    for _ in range(steps):
        parts = share(trainer.train_step_info.step, rank, size)
        losses.append(trainer.train_step(*parts)[0].item())
    return losses


def weights_of(trainer: ORTTrainer) -> dict[str, torch.Tensor]:
    """Return copies of parameters and buffers."""
    return {name: t.clone() for name, t in trainer.model.state_dict().items()}
