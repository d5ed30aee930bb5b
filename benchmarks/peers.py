# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a PyTorch user could pick: the sides of a comparison.

All of them train with AdamW at the same settings and clip the gradient norm to 1. On a GPU every
side takes a fused AdamW.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
MAX_NORM = 1.0

# glibc keeps freed memory instead of returning it to the system, which saves the page faults.
_KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclasses.dataclass(slots=True)
class Side:
    """A model ready to train.

    Attributes:
      model: What a step calls.
      optimizer: Its optimizer.
      clips: Whether the optimizer clips the gradient norm itself.
      describe: Facts for the output, asked for after the timed steps.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    clips: bool = False
    describe: Callable[[], dict[str, Any]] = dict


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """One side of a comparison.

    Attributes:
      what: It in words.
      make: Makes it of a model, whose parameters are where it is to train.
      environment: What its process runs in.
      modules: What ``make`` imports.
    """

    what: str
    make: Callable[[nn.Module], Side]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    modules: Sequence[str] = ()


def _adamw(model: nn.Module, *, fused: bool | None = None) -> torch.optim.AdamW:
    if fused is None and next(model.parameters()).device.type != "cpu":
        fused = True
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=fused
    )


def _eager(model: nn.Module) -> Side:
    return Side(model, _adamw(model))


def _tuned(model: nn.Module) -> Side:
    return Side(model, _adamw(model, fused=True))


def _compile(model: nn.Module) -> Side:
    return Side(torch.compile(model), _adamw(model))


def _ortrain(model: nn.Module) -> Side:
    from ortrain import ORTModule
    from ortrain.optim import FusedAdamW

    wrapped = ORTModule(model)
    optimizer = FusedAdamW(
        wrapped.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_NORM
    )

    def describe() -> dict[str, Any]:
        report = wrapped.report()
        fallback = next((c.fallback for c in report.captures if c.fallback), "")
        stages: dict[str, float] = {}
        for record in (*report.captures, *report.pieces):
            for stage, seconds in record.stages.items():
                stages[stage] = stages.get(stage, 0.0) + seconds
        return {"native_share": report.native_share, "fallback": fallback, "stages": stages}

    return Side(wrapped, optimizer, True, describe)


PEERS: dict[str, Peer] = {
    "eager": Peer("PyTorch as it comes", _eager),
    "tuned": Peer("PyTorch, fused AdamW, malloc keeps its memory", _tuned, _KEEP_MEMORY),
    "compile": Peer("torch.compile, default mode", _compile),
    "ortrain": Peer("ORTModule and FusedAdamW", _ortrain, modules=("ortrain", "ortrain.optim")),
}


@contextlib.contextmanager
def precision(dtype: str, device: str = "cpu") -> Iterator[None]:
    """Run what is inside under bf16 autocast where ``dtype`` is "bf16"."""
    kind = torch.device(device).type
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=dtype == "bf16"):
        yield


def make_step(
    side: Side, batch: dict[str, torch.Tensor], dtype: str, device: str = "cpu"
) -> Callable[[], torch.Tensor]:
    """Return a function that trains on the batch for one step and returns the loss.

    It does not wait for a device: reading the loss does.
    """
    parameters = [p for p in side.model.parameters() if p.requires_grad]
    placed = {name: tensor.to(device) for name, tensor in batch.items()}

    def step() -> torch.Tensor:
        with precision(dtype, device):
            loss = side.model(**placed).loss
        loss.backward()
        if not side.clips:
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True)
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
