# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""One side of ``ortrain bench``: a script in a process of its own, halted after each step.

The steps of the script's first optimizer divide it into turns. After each one the process tells how
long the turn took, and waits until it may go on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import ortrain.module
from ortrain.engine import Engine
from ortrain.tools.script import run_script

__all__ = ["GO", "STOP", "main"]

GO, STOP = b"g", b"s"


class PyTorchEngine(Engine):
    """Runs the module as it is, so that ORTModule changes nothing."""

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward in PyTorch."""
        return self.module.forward(*args, **kwargs)


class _Finished(BaseException):
    """Ends the script when enough steps have been seen."""


class Turns:
    """Divides this process's time into turns.

    Args:
      commands: File descriptor from which ``GO`` and ``STOP`` come.
      reports: File descriptor for one line of JSON per turn.
    """

    def __init__(self, commands: int, reports: int) -> None:
        self._commands = commands
        self._reports = reports
        self._optimizer: Any = None
        self._began = 0.0

    def begin(self) -> None:
        """Wait for the first turn."""
        self._wait()

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """End a turn where it is the first optimizer that has made a step."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.report({"seconds": time.perf_counter() - self._began})
        self._wait()

    def report(self, line: Mapping[str, Any]) -> None:
        """Tell the process that compares."""
        os.write(self._reports, json.dumps(line).encode() + b"\n")

    def _wait(self) -> None:
        if os.read(self._commands, 1) != GO:
            raise _Finished
        self._began = time.perf_counter()


def main(arguments: Sequence[str]) -> int:
    """Run a script: side, two file descriptors, script and its arguments."""
    side, commands, reports, script, *rest = arguments
    if side == "pytorch":
        ortrain.module.Engine = PyTorchEngine
    turns = Turns(int(commands), int(reports))
    register_optimizer_step_post_hook(turns.after_step)
    try:
        turns.begin()
        status = run_script(Path(script), rest)
    except _Finished:
        return 0
    turns.report({"status": status})
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
