# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory of an ORTModule: planned, steady, given back."""

from __future__ import annotations

import copy
import gc
import resource
import weakref
from typing import Any

import torch
from torch import nn
from wrapped_modules import Net, batch, pair

from ortrain import ORTModule, _core


def _steps(model: nn.Module, optimizer: Any, count: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        model(**batch(16, 32, step % 4))["loss"].backward()
        optimizer.step()


def test_steady_state_neither_allocates_nor_faults() -> None:
    torch.manual_seed(0)
    ours = ORTModule(Net(0.1))
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    _steps(ours, optimizer, 10)
    gc.collect()
    allocations = _core.memory_stats()["system_allocations"]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _steps(ours, optimizer, 20)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert _core.memory_stats()["system_allocations"] == allocations
    assert faults / 20 < 100


def test_dropped_forwards_free_their_memory() -> None:
    ours, _ = pair()
    ours(**batch())
    gc.collect()
    before = _core.memory_stats()["bytes_in_use"]
    for seed in range(5):
        ours(**batch(seed=seed))
    gc.collect()
    assert _core.memory_stats()["bytes_in_use"] <= before


def test_memory_plan_is_known() -> None:
    ours, _ = pair()
    assert ours.memory_plan() is None
    ours(**batch())
    plan = ours.memory_plan()
    assert plan is not None
    assert plan.arena_lower_bound <= plan.arena_bytes <= plan.total_bytes


def test_classes_go_with_their_modules() -> None:
    def wrapped_once() -> list[weakref.ref[Any]]:
        class Local(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear(x)

        module = Local()
        ours, again = ORTModule(module), ORTModule(copy.deepcopy(module))
        assert type(ours) is type(again)
        ours(torch.ones(2, 4)).sum().backward()
        return [weakref.ref(Local), weakref.ref(module), weakref.ref(type(ours))]

    references = wrapped_once()
    gc.collect()
    gc.collect()  # what the first one let go of has held more
    assert [reference() for reference in references] == [None] * 3
