# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's default generators, from which the forwards of captured graphs draw."""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class DropoutSource(enum.Enum):
    """Who draws the masks of dropout; other random numbers are PyTorch's in any case."""

    ENGINE = "engine"
    PYTORCH = "pytorch"

    @staticmethod
    def parse(value: str) -> DropoutSource:
        """Return the source of a name.

        Raises:
          ValueError: There is none of this name.
        """
        try:
            return DropoutSource(value)
        except ValueError:
            raise ValueError(f"random is {value!r}, expected 'engine' or 'pytorch'") from None


class GeneratorStates:
    """The states of the default generators of the CPU and of a device, at the moment it is made.

    Args:
      device: The device of a graph.
    """

    __slots__ = ("_cpu", "_device", "_of_device")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.default_generator.get_state()
        self._of_device: torch.Tensor | None = None
        if device.type != "cpu":
            self._of_device = torch.get_device_module(device).get_rng_state(device)

    def restore(self) -> None:
        """Put the generators back."""
        torch.default_generator.set_state(self._cpu)
        if self._of_device is not None:
            torch.get_device_module(self._device).set_rng_state(self._of_device, self._device)

    def seed(self) -> torch.Tensor:
        """Return the seed that ``draw_seed`` would give from this state; no generator moves."""
        generator = torch.Generator(self._device)
        generator.set_state(self._cpu if self._of_device is None else self._of_device)
        seed = torch.empty((), dtype=torch.int64, device=self._device)
        return seed.random_(generator=generator)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw once more what was drawn from these states; the generators stay where they are."""
        now = GeneratorStates(self._device)
        self.restore()
        try:
            yield
        finally:
            now.restore()


def draw_seed(device: torch.device) -> torch.Tensor:
    """Return a seed for the engine's own random numbers, an int64 scalar on the device."""
    return torch.empty((), dtype=torch.int64, device=device).random_()


# Between a function that sets the generator and who calls it.
_ROOT = os.path.dirname(torch.__file__) + os.sep
_PASSED_THROUGH = frozenset(
    {
        contextlib.__file__,
        torch.random.__file__,
        *(
            _ROOT + os.path.join(*names)
            for names in (("_compile.py",), ("_dynamo", "eval_frame.py"))
        ),
    }
)


class _WatchedGenerator:
    """Stands for the default generator in the functions of ``torch.random``.

    Notes whether code that is not PyTorch's own sets the generator or looks at it. A trace draws
    nothing, so that the state alone does not tell of what is set and put back.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._thread = generator, threading.get_ident()
        self.is_used = False

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename in _PASSED_THROUGH:
                frame = frame.f_back
            self.is_used |= not frame.f_code.co_filename.startswith(_ROOT)
        return getattr(self._generator, name)


@contextlib.contextmanager
def untouched_generator() -> Iterator[list[bool]]:
    """Keep PyTorch's generator of the CPU as it is, whatever a trace in the context does.

    A trace draws nothing. What threads draw meanwhile that were there before stays drawn, where the trace has neither
    touched the generator nor started a thread.

    Gives a list that tells, once the context is left, whether the code used it otherwise than by
    operators.
    """
    generator = torch.default_generator
    before = generator.get_state()
    is_alone = threading.active_count() == 1
    watched = _WatchedGenerator(generator)
    start, own, started = threading.Thread.start, threading.get_ident(), []

    def started_by_the_trace(thread: threading.Thread) -> None:
        if threading.get_ident() == own:
            started.append(thread)
        start(thread)

    touched: list[bool] = []
    try:
        with (
            mock.patch.object(torch.random, "default_generator", watched),
            mock.patch.object(threading.Thread, "start", started_by_the_trace),
        ):
            yield touched
    finally:
        has_moved = not torch.equal(before, generator.get_state())
        touched.append(watched.is_used or (has_moved and (is_alone or bool(started))))
        if has_moved and any(touched):
            generator.set_state(before)
