# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Lines of the list in parts of some minutes each: ``run.sh A`` of ``make gpu-kit``.

A part has lanes, which go side by side; the lines of a lane follow each other. Every line is a
process of its own: one that fails, or does not end, takes nothing else with it. What comes back is
written as it comes: ``lines.json`` (results by key) and ``log.txt`` (what the processes printed).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT

KILLED_AFTER = 15.0  # seconds behind the limit that a line itself knows
LEAST = 5.0  # seconds for which no line is begun


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What runs together.

    Attributes:
      title: It in words.
      seconds: How long it takes at most.
      lanes: Keys of lines, one after the other, side by side with those of the other lanes.
      arguments: For every line.
    """

    title: str
    seconds: float
    lanes: Sequence[Sequence[str]]
    arguments: Sequence[str] = ()


PARTS = {
    "A": Part(
        "first contact: layers, steps, faults, a profile",
        290.0,
        (("found", "steps", "fault"), ("layers-f32",), ("layers-bf16",), ("profile",)),
    ),
    "B": Part(
        "operators and models",
        550.0,
        (("op-cases", "op-gradients"), ("parity-f32",), ("parity-bf16",)),
    ),
    "C": Part("GPT-2 against PyTorch", 550.0, (("gpt2", "kernels"),)),
    "D": Part("sanitizers", 180.0, (("op-memcheck",), ("op-racecheck",), ("op-synccheck",))),
    "E": Part(
        "the other speeds, by worth",
        550.0,
        (("bert-base-cls", "llama-1b", "bert-large-mlm", "gpt2-medium", "bert-large-padded",
          "resnet-50", "t5-base", "vit-large", "soak", "ddp", "largest-batch"),),
        ("--peers", "eager,ortrain"),
    ),
}  # fmt: skip


class Results:
    """The two files of a run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = folder / "lines.json"
        self._log = folder / "log.txt"
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}
        if self._lines.exists():
            self._known = json.loads(self._lines.read_text(encoding="utf-8"))

    def add(self, key: str, made: dict[str, Any], printed: str) -> None:
        """Write what came of a line."""
        with self._lock:
            self._known[key] = made
            beside = self._lines.with_suffix(".part")
            beside.write_text(json.dumps(self._known, indent=1), encoding="utf-8")
            beside.replace(self._lines)
            with self._log.open("a", encoding="utf-8") as log:
                log.write(f"=== {key}\n{printed}\n")


def run_line(key: str, arguments: Sequence[str], seconds: float, results: Results) -> None:
    """Run one line in a process of its own, ended when it overruns."""
    with tempfile.TemporaryDirectory(prefix="ortrain-line-") as folder:
        log = Path(folder) / "log"
        command = [
            *(sys.executable, "-m", "benchmarks.gpu_all", "--only", key),
            *("--seconds", f"{seconds:.0f}", "--output", folder, *arguments),
        ]
        start = time.monotonic()
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status: int | None = process.wait(seconds + KILLED_AFTER)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                status = None
        files = list(Path(folder).glob("*.json"))
        lines = json.loads(files[0].read_text(encoding="utf-8"))["lines"] if files else {}
        made = lines.get(key, {"status": "failed", "error": f"no result, status {status}"})
        made["whole seconds"] = time.monotonic() - start
        results.add(key, made, log.read_text(errors="replace"))


def run_lanes(
    lanes: Sequence[Sequence[str]], seconds: float, arguments: Sequence[str], results: Results
) -> None:
    """Run lanes side by side, each until its lines are done or the time is over."""
    end = time.monotonic() + seconds

    def follow(lane: Sequence[str]) -> None:
        for key in lane:
            left = end - time.monotonic() - KILLED_AFTER
            if left < LEAST:
                results.add(key, {"status": "not run", "error": "no time was left"}, "")
                continue
            run_line(key, arguments, left, results)

    threads = [threading.Thread(target=follow, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; a line that fails is a result, so the status is 0."""
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__)
    parser.add_argument("part", nargs="?", choices=tuple(PARTS))
    parser.add_argument("--lane", action="append", default=[], help="keys by commas, repeatable")
    parser.add_argument("--seconds", type=float, help="in place of the part's own")
    parser.add_argument("--output", type=Path, required=True, help="folder for what comes back")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    options, more = parser.parse_known_args(arguments)
    if (options.part is None) == (not options.lane):
        parser.error("name a part, or lanes")
    if options.part is not None:
        part = PARTS[options.part]
    else:
        part = Part("lanes", 300.0, [lane.split(",") for lane in options.lane])
    given = [*part.arguments, *more, *(["--rehearse"] if options.rehearse else [])]
    run_lanes(part.lanes, options.seconds or part.seconds, given, Results(options.output))
    for key, made in json.loads((options.output / "lines.json").read_text()).items():
        error = str(made.get("error", "")).strip().splitlines()
        figures = {a["figure"]: a["value"] for a in made.get("aims", ())}
        sys.stdout.write(f"{key}: {made['status']} {figures} {error[-1] if error else ''}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
