# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Loss scaling by the rule of torch.amp.GradScaler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ortrain.amp.loss_scaler import LossScaler, require_above_zero, require_numbers

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def _float32(value: float) -> float:
    """Return the nearest float32: PyTorch keeps its scale in one."""
    return torch.tensor(value, dtype=torch.float32).item()


class GradScaler(LossScaler):
    """Scales the loss of an ORTTrainer as ``torch.amp.GradScaler`` scales it in a loop.

    A step whose gradients are not finite is left out, and multiplies the scale by
    ``backoff_factor``. After ``growth_interval`` steps in a row that are finite the scale is
    multiplied by ``growth_factor``, unless that is too large for float32. There are no bounds.

    Args:
      init_scale: The first scale.
      growth_factor: What the scale is multiplied by when it grows, above 1.
      backoff_factor: What it is multiplied by after an overflow, below 1.
      growth_interval: Steps in a row without overflow after which it grows.
      enabled: False: the loss is not scaled, and steps are not left out.

    Raises:
      ValueError: A number is out of range.

    Example:
      >>> scaler = GradScaler(init_scale=2.0**12, growth_interval=100)
      >>> options = ORTTrainerOptions({"mixed_precision": {"enabled": True, "loss_scaler": scaler}})
    """

    _kind = "GradScaler"

    def __init__(
        self,
        init_scale: float = float(1 << 16),
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not growth_factor > 1.0:
            raise ValueError(f"growth_factor is {growth_factor}, expected a number above 1")
        if not 0.0 < backoff_factor < 1.0:
            raise ValueError(f"backoff_factor is {backoff_factor}, expected a number in (0, 1)")
        if growth_interval < 1:
            raise ValueError(f"growth_interval is {growth_interval}, expected 1 or more")
        super().__init__(init_scale if enabled else 1.0)
        self.loss_scale = self._initial = _float32(self.loss_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.enabled = enabled
        self._growth_tracker = 0

    def reset(self) -> None:
        """Go back to the first scale."""
        super().reset()
        self._growth_tracker = 0

    def get_scale(self) -> float:
        """Return the scale, 1 where it is disabled."""
        return self.loss_scale

    def update(self, train_step_info: Any) -> float:
        """Return the scale of the next step, changed by what became of this one.

        Raises:
          FloatingPointError: It would become 0: the gradients are never finite.
        """
        if not self.enabled:
            return self.loss_scale
        if not train_step_info.all_finite:
            reduced = _float32(self.loss_scale * self.backoff_factor)
            if reduced == 0:
                raise FloatingPointError(
                    "the gradients are not finite at any loss scale; the last was "
                    f"{self.loss_scale:g}"
                )
            self.loss_scale = reduced
            self._growth_tracker = 0
            return self.loss_scale
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            grown = _float32(self.loss_scale * self.growth_factor)
            if math.isfinite(grown):
                self.loss_scale = grown
            self._growth_tracker = 0
        return self.loss_scale

    def state_dict(self) -> dict[str, Any]:
        """Return the state under the keys of torch.amp.GradScaler; empty where it is disabled."""
        if not self.enabled:
            return {}
        return {
            "scale": self.loss_scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state, also one of torch.amp.GradScaler; nothing where it is disabled.

        Raises:
          ValueError: A key is missing, as in the state of a disabled one, or a number is out of
            range; nothing has changed.
        """
        if not self.enabled:
            return
        self._take(state_dict)
        self._initial = self.loss_scale

    def _take(self, state: Mapping[str, Any]) -> None:
        """Take over a state, and leave the scale alone that ``reset`` goes back to."""
        if not self.enabled:
            return
        require_numbers(state, _KEYS)
        require_above_zero(state, _KEYS[:3])
        scale, growth, backoff, interval, tracker = (state[key] for key in _KEYS)
        self.loss_scale = _float32(scale)
        self.growth_factor, self.backoff_factor, self.growth_interval = growth, backoff, interval
        self._growth_tracker = tracker

    def _state(self) -> dict[str, Any]:
        state = self.state_dict()
        return {**state, "initial": self._initial} if state else {}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if not self.enabled:
            return
        require_numbers(state, (*_KEYS, "initial"))
        require_above_zero(state, (*_KEYS[:3], "initial"))

    def _load_state(self, state: Mapping[str, Any]) -> None:
        if self.enabled:
            self._check_state(state)
            self._take(state)
            self._initial = float(state["initial"])


class TorchGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` as the loss scaler of an ORTTrainer.

    The scale and its growth are read from it before a step and again before they change at its end,
    and written to it then, so that what the program does with it (``get_scale``, ``state_dict``,
    ``update(1024.0)``) holds. The batches of one step have the scale that the first of them had.

    Args:
      scaler: The scaler.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        enabled = scaler.is_enabled()
        super().__init__(scaler.get_scale(), enabled=enabled)
        if enabled:
            # It makes its tensors when it scales something; update(1024.0) needs them.
            scaler.scale(torch.zeros(()))
        self.load_state_dict(scaler.state_dict())

    def reset(self) -> None:
        """Go back to the first scale, and tell the scaler."""
        super().reset()
        self._tell()

    def before_step(self) -> None:
        """Take over what the program has done with the scaler."""
        self._take(self.scaler.state_dict())

    def update(self, train_step_info: Any) -> float:
        """Return the scale of the next step, and tell the scaler."""
        self._take(self.scaler.state_dict())
        scale = super().update(train_step_info)
        self._tell()
        return scale

    def _tell(self) -> None:
        self.scaler.load_state_dict(self.state_dict())

    def _load_state(self, state: Mapping[str, Any]) -> None:
        super()._load_state(state)
        self._tell()
