# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Preparing and training as a person at a terminal sees them.

Only where stderr is a terminal, in the main process, with rich installed and ORTRAIN_PROGRESS not
off. Everywhere else the ``ortrain`` loggers say the same, quietly.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from types import TracebackType
from typing import Any

from ortrain import logs, progress

__all__ = ["StageDisplay", "TrainingDisplay", "attach", "is_wanted"]

# Stages that took less than this many seconds leave no line behind.
_SHORTEST = 0.01

_attached = False
_training: TrainingDisplay | None = None


def is_wanted() -> bool:
    """Tell whether this process shows progress."""
    if os.environ.get("ORTRAIN_PROGRESS", "auto").strip().lower() in ("off", "0", "no", "false"):
        return False
    terminal = getattr(sys.stderr, "isatty", lambda: False)()
    return terminal and logs.is_main_process() and importlib.util.find_spec("rich") is not None


def attach() -> None:
    """Show the stages of this process from now on, where progress is wanted."""
    global _attached
    if not _attached and is_wanted():
        _attached = True
        progress.add_listener(StageDisplay())


class StageDisplay:
    """A listener of ``progress``: the stage that runs, and a line for each that took its time.

    Args:
      console: A rich console; None is stderr's.
    """

    def __init__(self, console: Any = None) -> None:
        self._console = console or _stderr_console()
        self._lock = threading.RLock()
        self._open = 0
        self._status: Any = None

    def __call__(self, name: str, seconds: float, state: progress.State) -> None:
        with self._lock:
            if state == "note":
                self._print(name)
            elif state == "begin":
                self._open += 1
                # Two displays that move would take each other's lines.
                if self._open == 1 and _training is None:
                    from rich.text import Text

                    # A name may look like markup.
                    self._status = self._console.status(Text(f"Ortrain: {name}"))
                    self._status.start()
            else:
                self._open -= 1
                if self._open == 0 and self._status is not None:
                    self._status.stop()
                    self._status = None
                if state == "failed":
                    self._print(f"{name} failed after {seconds:.2f} s")
                elif self._open == 0 and seconds >= _SHORTEST:
                    self._print(f"{name:<8} {seconds:.2f} s")

    def _print(self, text: str) -> None:
        console = _training.console if _training is not None else self._console
        console.print(f"Ortrain: {text}", style="dim", highlight=False, markup=False)


class TrainingDisplay:
    """A bar of steps with the time of one, tokens per second and memory.

    Args:
      total: Steps to come; None where that is not known.
      console: A rich console; None is stderr's.
    """

    def __init__(self, total: int | None = None, console: Any = None) -> None:
        from rich import progress as bars

        self.console = console or _stderr_console()
        columns = [
            bars.TextColumn("Ortrain"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[figures]}", markup=False),
            bars.TimeRemainingColumn(),
        ]
        self._bars = bars.Progress(*columns, console=self.console)
        self._task = self._bars.add_task("steps", total=total, figures="")

    def __enter__(self) -> TrainingDisplay:
        global _training
        self._bars.start()
        _training = self
        return self

    def show(self, figures: str) -> None:
        """Count a step and show what it took."""
        self._bars.update(self._task, advance=1, figures=figures)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _training
        _training = None
        self._bars.stop()


def _stderr_console() -> Any:
    from rich.console import Console

    return Console(stderr=True)
