# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Factors of the loss that keep small gradients from vanishing in 16-bit floats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def require_numbers(state: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise ValueError where a key of a scaler's state is missing or no number."""
    missing = [key for key in keys if key not in state]
    if missing:
        raise ValueError(f"state_dict has no {', '.join(map(repr, missing))}")
    for key in keys:
        if not isinstance(state[key], (int, float)):
            raise ValueError(f"state_dict['{key}'] is {state[key]!r}, expected a number")


def require_above_zero(state: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise ValueError where a number of a scaler's state is 0 or less."""
    for key in keys:
        if not state[key] > 0:
            raise ValueError(f"state_dict['{key}'] is {state[key]}, expected above 0")


class LossScaler:
    """A constant factor, and the base of those that change.

    Args:
      loss_scale: The factor.

    Raises:
      ValueError: The factor is not above 0.
    """

    # Whether the loss is scaled, and steps that overflow are left out.
    enabled: bool = True
    # Whether the trainer calls ``update`` after each optimizer step.
    automatic_update: bool = True

    # What a checkpoint calls scalers of this rule: states of one kind fit each other.
    _kind = "LossScaler"

    def __init__(self, loss_scale: float) -> None:
        if not loss_scale > 0:
            raise ValueError(f"loss_scale is {loss_scale}, expected a number above 0")
        self.loss_scale = float(loss_scale)
        self._initial = self.loss_scale

    def reset(self) -> None:
        """Go back to the first factor."""
        self.loss_scale = self._initial

    def before_step(self) -> None:
        """Called before the first batch of each optimizer step; ``loss_scale`` is read after it."""

    def update(self, train_step_info: Any) -> float:
        """Return the factor of the next step.

        Args:
          train_step_info: The step that was made; ``all_finite`` tells whether its gradients were.
        """
        del train_step_info
        return self.loss_scale

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"loss_scale": self.loss_scale, "initial": self._initial}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError where ``_load_state`` would not take a state."""
        require_numbers(state, LossScaler._state(self))
        require_above_zero(state, ("loss_scale", "initial"))

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._check_state(state)
        self.loss_scale, self._initial = state["loss_scale"], state["initial"]


class DynamicLossScaler(LossScaler):
    """Halves the factor when gradients overflow, doubles it after a number of steps without that.

    Args:
      automatic_update: Whether the trainer updates it after each optimizer step; otherwise whoever calls ``update`` does.
      loss_scale: The first factor.
      up_scale_window: Steps without overflow after which it is doubled.
      min_loss_scale: Lower bound.
      max_loss_scale: Upper bound.

    Raises:
      ValueError: The lower bound is above the upper one, or the window is not above 0.
    """

    _kind = "DynamicLossScaler"

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        super().__init__(loss_scale)
        if not min_loss_scale <= max_loss_scale:
            raise ValueError(
                f"min_loss_scale {min_loss_scale} is greater than max_loss_scale {max_loss_scale}"
            )
        if up_scale_window < 1:
            raise ValueError(f"up_scale_window is {up_scale_window}, expected 1 or more")
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self._stable_steps_count = 0

    def reset(self) -> None:
        """Go back to the first factor."""
        super().reset()
        self._stable_steps_count = 0

    def update(self, train_step_info: Any) -> float:
        """Return the factor of the next step, changed by what became of this one."""
        self._follow(train_step_info.all_finite)
        return self.loss_scale

    def _follow(self, all_finite: bool) -> None:
        if not all_finite:
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
            self._stable_steps_count = 0
            return
        self._stable_steps_count += 1
        if self._stable_steps_count >= self.up_scale_window:
            self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2)
            self._stable_steps_count = 0

    def _state(self) -> dict[str, Any]:
        return {
            **super()._state(),
            "automatic_update": self.automatic_update,
            "up_scale_window": self.up_scale_window,
            "min_loss_scale": self.min_loss_scale,
            "max_loss_scale": self.max_loss_scale,
            "stable_steps": self._stable_steps_count,
        }

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        require_numbers(state, DynamicLossScaler._state(self))
        require_above_zero(state, ("up_scale_window", "min_loss_scale", "max_loss_scale"))

    def _load_state(self, state: Mapping[str, Any]) -> None:
        super()._load_state(state)
        self.automatic_update = state["automatic_update"]
        self.up_scale_window = state["up_scale_window"]
        self.min_loss_scale = state["min_loss_scale"]
        self.max_loss_scale = state["max_loss_scale"]
        self._stable_steps_count = state["stable_steps"]
