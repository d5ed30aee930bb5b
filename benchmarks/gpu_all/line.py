# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""One line of the list: what is measured, what it should be, and what came of it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.worker import WorkerError

Say = Callable[[str], None]
_TOOL_FOLDERS = ("/usr/local/cuda/bin", "/opt/cuda/bin", "/opt/nvidia/nsight-compute")


def find_tool(name: str) -> str | None:
    """Return the path of one of CUDA's tools, on PATH or where CUDA lies; None where there is none."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *_TOOL_FOLDERS)))


@dataclasses.dataclass(frozen=True, slots=True)
class Aim:
    """A bound on a figure.

    Attributes:
      figure: Its name among the figures of the line.
      bound: What it should be at least.
      most: It should be at most the bound instead.
    """

    figure: str
    bound: float
    most: bool = False

    def reached_by(self, value: float) -> bool:
        """Tell whether a figure is within the bound."""
        return value <= self.bound if self.most else value >= self.bound

    def __str__(self) -> str:
        if self.most and self.bound == 0:
            return f"{self.figure} = 0"
        return f"{self.figure} {'≤' if self.most else '≥'} {self.bound:g}"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """How lines are run.

    Attributes:
      device: PyTorch's name of where they train; "cpu" in a rehearsal.
      provider: The engine's name of it; "simulator" in a rehearsal, where the build has one.
      rehearsal: Sizes are tiny, and no figure means anything.
      peers: Sides that are compared, the engine among them.
      rounds: Turns of each side.
      deadline: When the line has to be done, by ``time.monotonic()``.
      say: Called with what is being done.
      profile: Speed lines tell the kernels of a step.
      partial: Called with the figures there are so far, as ``Line.measure`` returns them.
    """

    device: str
    provider: str
    rehearsal: bool
    peers: Sequence[str]
    rounds: int
    deadline: float
    say: Say = lambda text: None
    profile: bool = False
    partial: Callable[[dict[str, Any]], None] = lambda figures: None

    def seconds_left(self) -> float:
        """Return the time until the deadline, at least a second."""
        return max(1.0, self.deadline - time.monotonic())

    def environment(self) -> dict[str, str]:
        """Return what lets modules run on the provider's kernels in a worker."""
        return {"ORTRAIN_GPU_SIMULATOR": "1"} if self.provider == "simulator" else {}


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of the list.

    Attributes:
      key: Its name on the command line.
      group: Lines that fit one command.
      title: What it is, in words.
      aims: What its figures should be.
      seconds: The most it may take.
      measure: Returns the figures by name; None stands for one that could not be had. Entries that
        are no numbers are details.
      check: Whether an aim that is missed is a fault of the engine, not a shortfall in speed.
    """

    key: str
    group: str
    title: str
    aims: tuple[Aim, ...]
    seconds: float
    measure: Callable[[Run], dict[str, Any]]
    check: bool = False


def outcome(line: Line, run: Run) -> dict[str, Any]:
    """Run a line and return its result; an error becomes part of it.

    Returns:
      "status": "reached", "missed", "incomplete" (a figure that an aim names was not measured, or
      the line was cut off, with "error"), "failed" (with "error"; the figures there are, are kept),
      or "rehearsed", which judges nothing; "figures", "aims" with "value" and "reached", "seconds".
    """
    start = time.monotonic()
    try:
        figures = line.measure(run)
    except (
        *(WorkerError, OSError, RuntimeError, ValueError, KeyError, ImportError),
        subprocess.TimeoutExpired,
    ) as raised:
        # The other lines go on; what happened stands in the result and sets the exit status.
        figures = {"error": f"{type(raised).__name__}: {raised}"}
    return result_of(line, figures, time.monotonic() - start, rehearsal=run.rehearsal)


def result_of(
    line: Line, figures: dict[str, Any], seconds: float, *, rehearsal: bool
) -> dict[str, Any]:
    """Return the result of a line; "error" or "unfinished" among its figures say what is wrong."""
    figures = dict(figures)
    error, unfinished = figures.pop("error", ""), figures.pop("unfinished", "")
    aims = []
    for aim in line.aims:
        value = figures.get(aim.figure)
        counts = value is not None and not rehearsal
        aims.append(
            {
                "figure": aim.figure,
                "aim": str(aim),
                "value": value,
                "reached": aim.reached_by(value) if counts else None,
            }
        )
    if error:
        status = "failed"
    elif unfinished:
        status = "incomplete"
    elif rehearsal:
        status = "rehearsed"
    elif any(aim["reached"] is False for aim in aims):
        status = "missed"
    else:
        status = "reached" if all(aim["reached"] for aim in aims) else "incomplete"
    result = {
        "group": line.group,
        "title": line.title,
        "check": line.check,
        "status": status,
        "aims": aims,
        "figures": figures,
        "seconds": seconds,
    }
    what = error or unfinished
    return result | ({"error": what} if what else {})


def not_run(line: Line, why: str) -> dict[str, Any]:
    """Return the result of a line that is left out."""
    aims = [
        {"figure": aim.figure, "aim": str(aim), "value": None, "reached": None} for aim in line.aims
    ]
    return {
        "group": line.group,
        "title": line.title,
        "check": line.check,
        "status": "not run",
        "aims": aims,
        "figures": {},
        "error": why,
    }


def is_fault(result: Mapping[str, Any]) -> bool:
    """Tell whether a result means that something is wrong, not only slow."""
    return result["status"] == "failed" or (
        result["check"] and result["status"] in ("missed", "incomplete")
    )
