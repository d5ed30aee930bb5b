# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules that many programs are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from conformance.silent.program import Session


class Linear(nn.Module):
    """Holds one layer of four features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Reads(Linear):
    """A layer whose output is scaled by what a function returns."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output times the number."""
        return self.linear(x) * float(self.read())


def train_through(s: Session, net: nn.Module, *changes: Callable[[], Any]) -> None:
    """Train twice, then once after each change."""
    model = s.wrap(net)
    s.train(model, s.leaf(3, 4))
    s.train(model, s.leaf(3, 4))
    for change in changes:
        change()
        s.train(model, s.leaf(3, 4))
