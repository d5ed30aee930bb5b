# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What loss scalers and schedulers learn of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ortrain.errors import ArgumentTypeError, ArgumentValueError
from ortrain.optim.config import _OptimizerConfig


class TrainStepInfo:
    """The state of the training around one step.

    Args:
      optimizer_config: The optimizer.
      all_finite: Whether all gradients of the step were finite.
      fetches: Names of the outputs that the caller wants; none for all. A trainer's own may be set between steps.
      optimization_step: Optimizer steps so far.
      step: Batches so far.

    Raises:
      ArgumentTypeError: An argument has another type.
      ArgumentValueError: A count is below 0.
    """

    def __init__(
        self,
        optimizer_config: _OptimizerConfig,
        all_finite: bool = True,
        fetches: Sequence[str] = (),
        optimization_step: int = 0,
        step: int = 0,
    ) -> None:
        if not isinstance(optimizer_config, _OptimizerConfig):
            raise ArgumentTypeError(
                "optimizer_config must be one of ortrain.optim's configurations"
            )
        if not isinstance(all_finite, bool):
            raise ArgumentTypeError("all_finite must be a bool")
        are_names = isinstance(fetches, (list, tuple)) and all(isinstance(n, str) for n in fetches)
        if not are_names:
            raise ArgumentTypeError("fetches must be a list of names")
        for name, count in (("optimization_step", optimization_step), ("step", step)):
            if isinstance(count, bool) or not isinstance(count, int):
                raise ArgumentTypeError(f"{name} must be an int")
            if count < 0:
                raise ArgumentValueError(f"{name} is {count}, expected 0 or more")
        self.optimizer_config = optimizer_config
        self.all_finite = all_finite
        self.fetches: list[str] = list(fetches)
        self.step = step
        self._state: Any = None
        self._steps_before = optimization_step

    @property
    def optimization_step(self) -> int:
        """Optimizer steps so far.

        On a device it goes back by those that turn out not to have been made.
        """
        return self._steps_before + self._steps_of_state()

    @optimization_step.setter
    def optimization_step(self, number: int) -> None:
        self._steps_before = number - self._steps_of_state()

    def _steps_of_state(self) -> int:
        return 0 if self._state is None else int(self._state.steps)

    def _follow(self, state: Any) -> None:
        """Count the steps that a state's ``steps`` counts, from now on."""
        number = self.optimization_step
        self._state = state
        self.optimization_step = number

    def __getstate__(self) -> dict[str, Any]:
        # Copies keep the number that it has now.
        return {**vars(self), "_state": None, "_steps_before": self.optimization_step}

    def __repr__(self) -> str:
        names = ("all_finite", "fetches", "optimization_step", "step")
        return f"TrainStepInfo({', '.join(f'{name}={getattr(self, name)}' for name in names)})"
