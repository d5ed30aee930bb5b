# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Factors of the loss that somebody else decides on: the caller of a step, or an object of the first trainer's kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ortrain.amp.loss_scaler import LossScaler


class GivenLossScale(LossScaler):
    """The factor that comes with each step; 1 where none does. ``set`` gives the next one."""

    _kind = "GivenLossScale"

    def __init__(self) -> None:
        super().__init__(1.0)

    def set(self, loss_scale: float) -> None:
        """Take the factor of the next optimizer step.

        Raises:
          ValueError: It is not above 0.
        """
        if not loss_scale > 0:
            raise ValueError(f"loss_scale is {loss_scale}, expected a number above 0")
        self.loss_scale = float(loss_scale)


@runtime_checkable
class UpdatesLossScale(Protocol):
    """What the first trainer asks of a loss scaler of any class."""

    loss_scale_: float

    def update_loss_scale(self, is_all_finite: bool) -> None:
        """Change ``loss_scale_`` by what became of a step."""


class FollowedLossScaler(LossScaler):
    """The factor of an object that has ``loss_scale_`` and ``update_loss_scale``.

    Args:
      followed: The object.
    """

    _kind = "FollowedLossScaler"

    def __init__(self, followed: UpdatesLossScale) -> None:
        super().__init__(float(followed.loss_scale_))
        self.followed = followed

    def before_step(self) -> None:
        """Read the object's factor."""
        self.loss_scale = float(self.followed.loss_scale_)

    def update(self, train_step_info: Any) -> float:
        """Tell the object what became of the step, return its factor."""
        self.followed.update_loss_scale(bool(train_step_info.all_finite))
        self.before_step()
        return self.loss_scale

    def reset(self) -> None:
        """Reset the object where it can be."""
        reset = getattr(self.followed, "reset", None)
        if callable(reset):
            reset()
            self.before_step()

    def _load_state(self, state: Mapping[str, Any]) -> None:
        super()._load_state(state)
        self.followed.loss_scale_ = self.loss_scale
