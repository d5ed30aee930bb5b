# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a PyTorch user could pick on a CPU: the sides of a comparison.

All of them train with AdamW at the same settings and clip the gradient norm to 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
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
    """One side of a comparison: how to make it, and the environment its process runs in."""

    what: str
    make: Callable[[nn.Module], Side]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **settings
    )


def _eager(model: nn.Module) -> Side:
    return Side(model, _adamw(model))


def _tuned(model: nn.Module) -> Side:
    return Side(model, _adamw(model, fused=True))


def _compile(model: nn.Module) -> Side:
    return Side(torch.compile(model), _adamw(model))


def _ortrain(model: nn.Module) -> Side:
    from ortrain import ORTModule

    wrapped = ORTModule(model)
    optimizer, clips = _ortrain_optimizer(wrapped)

    def describe() -> dict[str, Any]:
        report = wrapped.report()
        fallback = next((c.fallback for c in report.captures if c.fallback), "")
        return {"native_share": report.native_share, "fallback": fallback}

    return Side(wrapped, optimizer, clips, describe)


def _ortrain_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, bool]:
    try:
        from ortrain.optim import FusedAdamW
    except ImportError:
        return _adamw(model, fused=True), False
    optimizer = FusedAdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_NORM
    )
    return optimizer, True


PEERS: dict[str, Peer] = {
    "eager": Peer("PyTorch as it comes", _eager),
    "tuned": Peer("PyTorch, fused AdamW, malloc keeps its memory", _tuned, _KEEP_MEMORY),
    "compile": Peer("torch.compile, default mode", _compile),
    "ortrain": Peer("ORTModule", _ortrain),
}


@contextlib.contextmanager
def _precision(dtype: str) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
        yield


def make_step(side: Side, batch: dict[str, torch.Tensor], dtype: str) -> Callable[[], float]:
    """Return a function that trains on the batch for one step and returns the loss."""
    parameters = [p for p in side.model.parameters() if p.requires_grad]

    def step() -> float:
        with _precision(dtype):
            loss = side.model(**batch).loss
        loss.backward()
        if not side.clips:
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True)
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step
