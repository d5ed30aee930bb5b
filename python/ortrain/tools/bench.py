# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The steps of a script on Ortrain and in plain PyTorch, turn by turn: ``ortrain bench``.

The script runs twice at the same time, in processes of their own of which one is always halted:
once as it is, once with ORTModules that run their module in PyTorch. What else the script takes
from Ortrain, its optimizers for one, is the same on both sides. A step goes from one step of the
script's first optimizer to the next, with its data, forward, backward and whatever lies between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ortrain.profile.text import duration

__all__ = ["BenchError", "BenchResult", "compare"]

# bench_worker's; that module imports torch, which this process has no use for.
_GO, _STOP = b"g", b"s"
# Seconds in which a side must end after it was told to.
_PATIENCE = 10.0
# Lines that are shown of what a failing side printed.
_MOST_LINES = 20


class BenchError(RuntimeError):
    """A script whose steps cannot be compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class BenchResult:
    """Seconds of each timed step, in the order in which the steps were made.

    Attributes:
      ortrain: On the engine.
      pytorch: In PyTorch; as many.
      first_ortrain: The script from its start to the end of its first step.
      first_pytorch: The same in PyTorch.
    """

    ortrain: list[float]
    pytorch: list[float]
    first_ortrain: float
    first_pytorch: float

    @property
    def ratio(self) -> float:
        """Median step of Ortrain over that of PyTorch: below 1 is faster."""
        return statistics.median(self.ortrain) / statistics.median(self.pytorch)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON, with the ratio."""
        return {**dataclasses.asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        rows = [("", "median step", "fastest", "slowest", "until the first step's end")]
        for name, times, first in (
            ("PyTorch", self.pytorch, self.first_pytorch),
            ("Ortrain", self.ortrain, self.first_ortrain),
        ):
            values = (statistics.median(times), min(times), max(times), first)
            rows.append((name, *map(duration, values)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        pairs = sorted(a / b for a, b in zip(self.ortrain, self.pytorch, strict=True))
        low, high = pairs[len(pairs) // 4], pairs[-1 - len(pairs) // 4]
        lines.append(
            f"Ortrain takes {self.ratio:.3f} of PyTorch's time for a step ({1 / self.ratio:.2f} "
            f"times as fast); {len(self.ortrain)} steps each, of neighbouring ones the middle half "
            f"between {low:.3f} and {high:.3f}"
        )
        return "\n".join(lines)


def compare(
    script: Path, arguments: Sequence[str] = (), *, timed: int = 20, warmup: int = 3
) -> BenchResult:
    """Run a script on both sides, turn by turn, and time its steps.

    Whatever it does besides, such as writing files, it does twice.

    Args:
      script: An existing file that trains with a ``torch.optim.Optimizer``.
      arguments: What follows it in ``sys.argv``.
      timed: Steps of each side that count; fewer where the script ends before.
      warmup: Steps before them that do not.

    Raises:
      BenchError: It fails, or makes no more than ``warmup`` steps.
    """
    times: dict[str, list[float]] = {"ortrain": [], "pytorch": []}
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(_Side(name, script, arguments)) for name in times]
        for number in range(warmup + timed):
            # Who goes first alternates: neither always runs on what the other left in the caches.
            order = sides if number % 2 == 0 else sides[::-1]
            took = {side.name: side.turn() for side in order}
            if None in took.values():
                break
            for name, seconds in took.items():
                times[name].append(seconds)
    made = len(times["ortrain"])
    if made == 0:
        raise BenchError("no step of a torch.optim.Optimizer was seen on both sides")
    if made <= warmup:
        raise BenchError(
            f"it made {made} steps, of which the first {warmup} do not count; let it make more, or "
            "choose a smaller --warmup"
        )
    return BenchResult(
        ortrain=times["ortrain"][warmup:],
        pytorch=times["pytorch"][warmup:],
        first_ortrain=times["ortrain"][0],
        first_pytorch=times["pytorch"][0],
    )


class _Side:
    """A process that runs the script, and is halted when it is not its turn."""

    def __init__(self, name: str, script: Path, arguments: Sequence[str]) -> None:
        self.name = name
        number, path = tempfile.mkstemp(prefix="ortrain-bench-")
        self._output = os.fdopen(number, "r+b")
        os.unlink(path)
        theirs_in, self._commands = os.pipe()
        self._reports, theirs_out = os.pipe()
        command = [sys.executable, "-m", "ortrain.tools.bench_worker", name]
        command += [str(theirs_in), str(theirs_out), str(script), *arguments]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs_in, theirs_out),
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._received = b""

    def __enter__(self) -> _Side:
        return self

    def turn(self) -> float | None:
        """Let it make one step; returns the seconds it took, None where the script has ended.

        Raises:
          BenchError: The script has failed.
        """
        self._command(_GO)
        report = json.loads(self._line() or b"{}")
        if "seconds" in report:
            return report["seconds"]
        if report.get("status", 1) == 0:
            return None
        self._process.wait()
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace").splitlines()[-_MOST_LINES:]
        raise BenchError(f"it fails as {self.name}:\n" + "\n".join(printed))

    def _line(self) -> bytes:
        """Return the next line that it reports; empty where it has ended without one."""
        while b"\n" not in self._received:
            # Helpers that the script has forked may hold the pipe open for longer than it lives.
            ended = self._process.poll() is not None
            ready, _, _ = select.select([self._reports], [], [], 0.0 if ended else 1.0)
            part = os.read(self._reports, 65536) if ready else b""
            if not part and (ready or ended):
                return b""
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _command(self, word: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # what it reported last says why
            os.write(self._commands, word)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._command(_STOP)
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._reports)
        self._output.close()
