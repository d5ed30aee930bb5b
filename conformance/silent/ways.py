# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs programs in a process per way, again behind one that crashed or hung, and judges them."""

from __future__ import annotations

import dataclasses
import enum
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from conformance.silent.observed import Raised, Run, Tensor, first_difference
from conformance.silent.program import Program

START_SECONDS = 120.0
PROGRAM_SECONDS = 120.0


class Verdict(enum.Enum):
    """What a way made of a program, against PyTorch alone."""

    right = "right"
    wrong = "wrong (silent)"
    error = "error"
    raised = "raised as eager"


@dataclasses.dataclass(frozen=True)
class Judged:
    """A program in one way.

    Attributes:
      verdict: What became of it.
      detail: What differs, or what was raised.
      how: How Ortrain ran it.
      why: Why not natively.
    """

    verdict: Verdict
    detail: str = ""
    how: str = ""
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A program in all ways.

    Attributes:
      program: The program.
      judged: By way.
    """

    program: Program
    judged: dict[str, Judged]


def run(
    chosen: Sequence[Program],
    ways: Sequence[str],
    told: Callable[[str, str], None] = lambda way, name: None,
    seconds: float = PROGRAM_SECONDS,
    device: str = "cpu",
) -> list[Outcome]:
    """Run programs in PyTorch and in ``ways``; return what became of each.

    Args:
      chosen: The programs.
      ways: Of "compile" and "ortrain".
      told: Called with the way and the name when a program has ended.
      seconds: The time limit of one program.
      device: Where tensors are made that name no device, and modules with them. Programs that raise
        in PyTorch alone elsewhere than on the CPU are left out: they exchange with NumPy.

    Raises:
      RuntimeError: A program raises on the CPU, crashes or takes too long in PyTorch alone.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {}
        for way in ("eager", *ways):
            runs[way] = _run_way(way, chosen, folder, told, seconds, device)
            if way == "eager" and device != "cpu":
                chosen = [program for program in chosen if not runs[way][program.name].error]
    outcomes = []
    for program in chosen:
        eager = runs["eager"][program.name]
        if eager.how or eager.error:
            raise RuntimeError(f"{program.name} in PyTorch alone: {eager.how} {eager.error}")
        judged = {way: _judge(program, eager, runs[way][program.name]) for way in ways}
        outcomes.append(Outcome(program, judged))
    return outcomes


def describe(outcomes: Sequence[Outcome], *, every: bool) -> Iterator[str]:
    """Yield what differs or was raised; with ``every`` also why programs did not run natively."""
    for outcome in outcomes:
        for way, judged in outcome.judged.items():
            if every or judged.verdict in (Verdict.wrong, Verdict.error):
                detail = " ".join((judged.detail or judged.why).split())[:400]
                yield f"{outcome.program.name} ({way}): {judged.verdict.value}: {detail}"


def _judge(program: Program, eager: Run, found: Run) -> Judged:
    if not found.seen and found.how in ("crashed", "took too long"):
        return Judged(Verdict.error, f"{found.how}: {found.error}")
    first = first_difference(eager.seen, found.seen, program.comparison)
    if first.text:
        verdict = Verdict.error if first.refused else Verdict.wrong
        return Judged(verdict, first.text, found.how, found.why)
    if found.error:
        return Judged(Verdict.error, found.error, found.how, found.why)
    if len(found.seen) != len(eager.seen):
        return Judged(Verdict.wrong, f"shows {len(found.seen)} values for {len(eager.seen)}")
    raised = [x.said for _, x in eager.seen if isinstance(x, Raised) and x.said]
    if raised:
        return Judged(Verdict.raised, raised[0], found.how, found.why)
    return Judged(Verdict.right, "", found.how, found.why)


def _run_way(
    way: str,
    chosen: Sequence[Program],
    folder: Path,
    told: Callable[[str, str], None],
    seconds: float,
    device: str,
) -> dict[str, Run]:
    """Run all programs in one way, in as many processes as that takes."""
    left = list(chosen)
    runs: dict[str, Run] = {}
    while left:
        ended, hit, (how, said) = _run_process(way, left, folder, told, seconds, device)
        with torch.serialization.safe_globals([Run, Raised, Tensor]):
            for name in ended:
                runs[name] = torch.load(folder / f"{name}.{way}", weights_only=True)
        if hit:
            runs[hit] = Run([], said, how)
            told(way, hit)
        left = [program for program in left if program.name not in runs]
    return runs


def _run_process(
    way: str,
    chosen: Sequence[Program],
    folder: Path,
    told: Callable[[str, str], None],
    seconds: float,
    device: str,
) -> tuple[list[str], str, tuple[str, str]]:
    """Return the programs that ended, the one that ended the process, and why."""
    repository = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "conformance.silent.worker", way, str(folder)]
    command += ["--device", device]
    modules = dict.fromkeys(program.body.__module__ for program in chosen)
    command += [f"--module={module}" for module in modules]
    command += [program.name for program in chosen]
    path = os.pathsep.join(filter(None, [str(repository), os.environ.get("PYTHONPATH")]))
    with open(folder / f"stderr.{way}", "w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=repository,
            env={**os.environ, "PYTHONPATH": path},
        )
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        ended: list[str] = []
        current, limit = "", START_SECONDS
        try:
            while (line := lines.get(timeout=limit)) is not None:
                word, _, name = line.strip().partition(" ")
                if word == "begin":
                    current, limit = name, seconds
                elif word == "end":
                    current, limit = "", START_SECONDS
                    ended.append(name)
                    told(way, name)
        except queue.Empty:
            process.kill()
            process.wait()
            return ended, current or chosen[len(ended)].name, ("took too long", f"{limit:.0f} s")
        status = process.wait()
        if status == 0:
            return ended, "", ("", "")
        errors.seek(0)
        said = errors.read().strip().splitlines()[-1:] or [""]
        return ended, current or chosen[len(ended)].name, ("crashed", f"status {status}: {said[0]}")


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)
