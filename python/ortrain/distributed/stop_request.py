# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Requests to stop that reach one process and are followed by all."""

from __future__ import annotations

import signal
import types

import torch

from ortrain.distributed.processes import Processes


class StopRequest:
    """Tells all processes between two steps that one of them was asked to end.

    Used as a context; inside of it the signal only leaves a note. The main thread must enter.

    Args:
      processes: Those that train together; None for this one alone.
      number: The signal, SIGTERM by default.

    Example:
      >>> with StopRequest(Processes()) as stop:
      ...     while not stop.asked() and trainer.train_step_info.step < steps:
      ...         trainer.train_step(*next(batches))
      ...     trainer.save_checkpoint(folder)
    """

    def __init__(
        self, processes: Processes | None = None, number: signal.Signals = signal.SIGTERM
    ) -> None:
        self._processes = processes
        self._number = number
        self._noted = False
        self._before: object = None

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(self._number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(self._number, self._before)  # type: ignore[arg-type]

    def asked(self) -> bool:
        """Return whether any process has the signal; all must ask at the same time."""
        if self._processes is None:
            return self._noted
        noted = torch.tensor(int(self._noted))
        self._processes.all_reduce(noted, "MAX")
        return bool(noted)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        del number, frame
        self._noted = True
