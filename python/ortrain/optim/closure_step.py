# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A step of an optimizer around one update of all parameters."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch


class ClosureStep(torch.optim.Optimizer):
    """Evaluates the closure that a step may be given, then updates."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
          closure: Evaluates the model again and returns the loss.

        Returns:
          What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    @abc.abstractmethod
    def _update_all(self) -> None:
        """Update all parameters that have a gradient."""
