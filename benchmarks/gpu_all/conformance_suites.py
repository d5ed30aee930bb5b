# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Suites of ``python -m conformance`` on the device, each by several processes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT, package_path
from benchmarks.gpu_all.line import Aim, Line, Run

PROCESSES = {"operators": 6, "silent": 4}
_FEW = 3
# Seconds for what began last; the programs of a suite run together, twice.
_LEFT_FOR_LAST = {"silent": 50.0}
_LEFT_FOR_ONE = 25.0
_WRONG = {"wrong", "failed", "error"}
_REHEARSED = {"operators": ["nn.functional.gelu"], "silent": ["layers"], "architectures": ["gpt2"]}


def _commands(run: Run, suite: str, folder: Path) -> list[list[str]]:
    """Return a command per process."""
    processes = 1 if run.rehearsal else PROCESSES.get(suite, _FEW)
    begin_until = max(1.0, run.seconds_left() - _LEFT_FOR_LAST.get(suite, _LEFT_FOR_ONE))
    commands = []
    for index in range(processes):
        if suite == "stateful":
            arguments = ["conformance.stateful_programs", "--first", str(index * 10000)]
            arguments += ["--count", "3" if run.rehearsal else "100000"]
        else:
            arguments = ["conformance", "--suite", suite, "--part", f"{index}/{processes}"]
            arguments += ["--programs", "2" if run.rehearsal else "40", "--samples", "2"]
            arguments += _REHEARSED.get(suite, []) if run.rehearsal else []
        arguments += ["--device", run.device, "--seconds", f"{begin_until:.0f}"]
        arguments += ["--json", str(folder / f"{index}.json")]
        commands.append([sys.executable, "-m", *arguments])
    return commands


def measure_suite(run: Run, *, suite: str) -> dict[str, Any]:
    """Run one suite in several processes, as much of it as the time allows.

    Returns:
      "wrong": cases that differ from PyTorch or raise where it does not; "compared"; "differences";
      "ended badly": the last lines of processes that wrote no result.
    """
    run.say(suite)
    with tempfile.TemporaryDirectory(prefix="ortrain-suite-") as name:
        folder = Path(name)
        environment = {**os.environ, **run.environment(), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = package_path(os.environ.get("PYTHONPATH"))
        logs = []
        processes = []
        for index, command in enumerate(_commands(run, suite, folder)):
            logs.append(folder / f"{index}.log")
            with logs[-1].open("w") as out:
                processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
                    )
                )
        results: list[Any] = []
        badly: list[str] = []
        for index, process in enumerate(processes):
            try:
                process.wait(run.seconds_left())
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            made = folder / f"{index}.json"
            if made.exists():
                results += json.loads(made.read_text())[suite]
            else:
                badly.append("\n".join(logs[index].read_text().splitlines()[-12:]))
    found = figures(suite, results)
    if badly:
        found["ended badly"] = badly
        found["unfinished"] = f"{len(badly)} of {len(processes)} processes wrote no result"
    return found


def figures(suite: str, results: Sequence[Any]) -> dict[str, Any]:
    """Return the figures of results as a suite writes them; without any nothing is "wrong" or not."""
    if not results:
        return {"compared": 0}
    if suite == "architectures":
        wrong = [f"{r['name']}: {r['difference']}" for r in results if r["difference"]]
        native = [r for r in results if not r["difference"] and not r["fallback"]]
        apart = [f"{r['name']}: {r['fallback']}" for r in results if r["fallback"]]
        return {
            "wrong": len(wrong),
            "compared": len(results),
            "one graph": len(native),
            "differences": wrong,
            "no graph": apart,
        }
    if suite in ("stateful", "programs"):
        wrong = [str(told) for _, told in results if told]
    else:
        wrong = [f"{r[0]}: {r[1]}: {r[-1]}" for r in results if r[1] in _WRONG]
    counts: dict[str, int] = {}
    for r in results:
        if isinstance(r[1], str):
            counts[r[1]] = counts.get(r[1], 0) + 1
    return {"wrong": len(wrong), "compared": len(results), "differences": wrong, "counts": counts}


def _line(suite: str, title: str) -> Line:
    return Line(
        f"suite-{suite}",
        "suites",
        title,
        (Aim("wrong", 0, most=True),),
        300.0,
        functools.partial(measure_suite, suite=suite),
        check=True,
    )


LINES: tuple[Line, ...] = (
    _line("operators", "PyTorch's own operators, values and gradients, beside PyTorch"),
    _line("architectures", "Tiny models of transformers beside PyTorch"),
    _line("silent", "Changing state, aliases and draws beside PyTorch"),
    _line("stateful", "Random modules with state beside PyTorch"),
    _line("programs", "Random modules beside PyTorch"),
)
