# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a trainer keeps in a checkpoint beside tensors, read with suspicion: files may say anything."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from ortrain.errors import InvalidModelError

_MOST_STEPS = 2**62


@dataclasses.dataclass(frozen=True, slots=True)
class Accumulation:
    """Batches of an optimizer step that was not over.

    Attributes:
      batches: How many there were, 1 or more.
      of: How many there are to be.
      loss_scale: What their gradients hold as a factor.
    """

    batches: int
    of: int
    loss_scale: float


@dataclasses.dataclass(frozen=True, slots=True)
class LossScalerState:
    """The state of a loss scaler, which its class knows how to check."""

    kind: str
    state: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class KeptProperties:
    """What a checkpoint says of a trainer; None and nothing where it does not.

    Attributes:
      optimization_step: Optimizer steps.
      step: Batches.
      optimizer: The optimizer's name.
      lr: The learning rate, finite and not below 0.
      user: What the program keeps.
      scheduler: The state of the learning rate's schedule.
      loss_scaler: That of the loss scaler.
      accumulation: Of a step that was not over.
    """

    optimization_step: int | None = None
    step: int | None = None
    optimizer: str | None = None
    lr: float | None = None
    user: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scheduler: Mapping[str, Any] | None = None
    loss_scaler: LossScalerState | None = None
    accumulation: Accumulation | None = None

    @staticmethod
    def parse(text: str) -> KeptProperties:
        """Read the property of a checkpoint.

        Raises:
          InvalidModelError: It is no JSON object, or an entry is of another kind or out of range.
        """
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidModelError(f"what the checkpoint says of the trainer: {error}") from error
        entries = _Entries(given, "what the checkpoint says of the trainer")
        return KeptProperties(
            optimization_step=entries.get("optimization_step", _count),
            step=entries.get("step", _count),
            optimizer=entries.get("optimizer", _text),
            lr=entries.get("lr", _hex_number),
            user=entries.get("user", _object) or {},
            scheduler=entries.get("scheduler", _object),
            loss_scaler=entries.get("loss_scaler", _loss_scaler),
            accumulation=entries.get("accumulation", _accumulation),
        )


class _Entries:
    """Entries of a JSON object.

    Args:
      given: What should be one.
      what: What errors call it.
    """

    def __init__(self, given: Any, what: str) -> None:
        if not isinstance(given, dict):
            raise InvalidModelError(f"{what} is no object of JSON")
        self._given, self._what = given, what

    def get(self, name: str, read: Callable[[Any], Any]) -> Any:
        """Return an entry, None where there is none."""
        return self.required(name, read) if name in self._given else None

    def required(self, name: str, read: Callable[[Any], Any]) -> Any:
        try:
            return read(self._given[name])
        except KeyError:
            raise InvalidModelError(f"{self._what} lacks '{name}'") from None
        except (TypeError, ValueError, OverflowError) as error:
            shown = repr(self._given[name])
            shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
            raise InvalidModelError(f"{self._what} has '{name}' as {shown}: {error}") from error


def _hex_number(value: Any) -> float:
    """Return a finite number, not below 0, that was written by ``float.hex``.

    Raises:
      TypeError: It is no text.
      ValueError: It is no such number.
    """
    number = float.fromhex(_text(value))
    if not math.isfinite(number) or number < 0:
        raise ValueError("expected a finite number, 0 or more")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected a text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("expected a whole number")
    if not 0 <= value < _MOST_STEPS:
        raise ValueError("expected 0 or more")
    return value


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    return value


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("expected a number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError("expected a finite number above 0")
    return float(value)


def _positive_count(value: Any) -> int:
    if _count(value) == 0:
        raise ValueError("expected 1 or more")
    return int(value)


def _loss_scaler(value: Any) -> LossScalerState:
    entries = _Entries(value, "the checkpoint's loss scaler")
    return LossScalerState(entries.required("kind", _text), entries.required("state", _object))


def _accumulation(value: Any) -> Accumulation:
    entries = _Entries(value, "the checkpoint's unfinished step")
    return Accumulation(
        batches=entries.required("batches", _positive_count),
        of=entries.required("of", _positive_count),
        loss_scale=entries.required("loss_scale", _positive),
    )
