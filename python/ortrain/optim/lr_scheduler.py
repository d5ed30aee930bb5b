# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Learning rates that depend on the step: a warm-up, then constant, cosine, linear or polynomial.

The rate of a step is the configured rate times a factor of the step's number alone.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any


class _LRScheduler(abc.ABC):
    """Gives the learning rate of each step of the optimizer, whose configuration stays as it is."""

    # Of the latest step; classes may have constructors that do not call this one's.
    _last_lr: list[float] = []

    def __init__(self) -> None:
        self._last_lr = []

    @abc.abstractmethod
    def get_lr(self, train_step_info: Any) -> list[float]:
        """Return the rate of the step that comes after ``optimization_step`` steps.

        ``optimizer_config.lr`` is the configured rate.
        """

    def get_last_lr(self) -> list[float]:
        """Return the rate of the latest step; empty before the first."""
        return list(self._last_lr)

    def _step(self, train_step_info: Any) -> list[float]:
        config = train_step_info.optimizer_config
        configured = config.lr
        try:
            self._last_lr = [float(rate) for rate in self.get_lr(train_step_info)]
        finally:
            config.lr = configured
        return list(self._last_lr)

    def _state(self) -> dict[str, Any]:
        return {"last": float(self._last_lr[0]).hex() if self._last_lr else None}

    @staticmethod
    def _check_state(state: Mapping[str, Any]) -> None:
        """Raise ValueError where ``_load_state`` would not take a state."""
        for name in ("last", "base"):
            value = state.get(name, None if name == "base" else "")
            if value is None:
                continue
            try:
                is_rate = math.isfinite(float.fromhex(value))
            except (TypeError, ValueError, OverflowError):
                is_rate = False
            if not is_rate:
                raise ValueError(f"'{name}' is no finite number")

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._check_state(state)
        self._last_lr = [] if state["last"] is None else [float.fromhex(state["last"])]


class _WarmupLRScheduler(_LRScheduler):
    """Grows the rate linearly over the first steps, from 0 in the first, then follows ``_factor``.

    Steps are counted from 0 and the warm-up takes ``warmup * total_steps`` of them, no whole number in general: the
    formulas of ``onnxruntime.training`` and of transformers' schedules.

    Args:
      total_steps: Optimizer steps of the whole training.
      warmup: Share of them in which the rate grows.

    Raises:
      ValueError: ``total_steps`` is not above 0, or ``warmup`` not from 0 to below 1.
    """

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        super().__init__()
        if not isinstance(total_steps, int) or total_steps < 1:
            raise ValueError(f"total_steps is {total_steps}, expected a number above 0")
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup is {warmup}, expected from 0 to below 1")
        self.total_steps = total_steps
        self.warmup = warmup
        self._num_warmup_steps = warmup * total_steps

    def get_lr(self, train_step_info: Any) -> list[float]:
        step, warmup = train_step_info.optimization_step, self._num_warmup_steps
        lr = train_step_info.optimizer_config.lr
        growing = step < warmup
        return [lr * (step / max(1.0, warmup) if growing else self._factor(step, warmup, lr))]

    @abc.abstractmethod
    def _factor(self, step: int, warmup: float, lr: float) -> float:
        """Return the factor of a step, counted from 0, behind a warm-up of so many."""


class ConstantWarmupLRScheduler(_WarmupLRScheduler):
    """Stays at the configured rate after the warm-up."""

    def _factor(self, step: int, warmup: float, lr: float) -> float:
        del step, warmup, lr
        return 1.0


class CosineWarmupLRScheduler(_WarmupLRScheduler):
    """Follows a cosine after the warm-up.

    Args:
      total_steps: Optimizer steps of the whole training.
      cycles: Periods of the cosine; half of one ends at zero.
      warmup: Share of the steps in which the rate grows.
    """

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not cycles > 0:
            raise ValueError(f"cycles is {cycles}, expected a number above 0")
        self.cycles = cycles

    def _factor(self, step: int, warmup: float, lr: float) -> float:
        del lr
        progress = (step - warmup) / max(1, self.total_steps - warmup)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * self.cycles * 2.0 * progress)))


class LinearWarmupLRScheduler(_WarmupLRScheduler):
    """Falls linearly to zero after the warm-up."""

    def _factor(self, step: int, warmup: float, lr: float) -> float:
        del lr
        return max(0.0, (self.total_steps - step) / max(1, self.total_steps - warmup))


class PolyWarmupLRScheduler(_WarmupLRScheduler):
    """Falls as a power of the steps that are left after the warm-up.

    Args:
      total_steps: Optimizer steps of the whole training.
      lr_end: The rate at the end, below the configured one.
      power: The power.
      warmup: Share of the steps in which the rate grows.
    """

    def __init__(
        self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002
    ) -> None:
        super().__init__(total_steps, warmup)
        if not lr_end >= 0:
            raise ValueError(f"lr_end is {lr_end}, expected 0 or more")
        if not power >= 0:
            raise ValueError(f"power is {power}, expected 0 or more")
        self.lr_end = lr_end
        self.power = power

    def _factor(self, step: int, warmup: float, lr: float) -> float:
        if not lr > self.lr_end:
            raise ValueError(f"lr_end ({self.lr_end}) must be smaller than the rate ({lr})")
        if step > self.total_steps:
            return self.lr_end / lr
        left = 1.0 - (step - warmup) / (self.total_steps - warmup)
        return ((lr - self.lr_end) * left**self.power + self.lr_end) / lr
