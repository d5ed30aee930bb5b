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
from benchmarks.gpu_all.__main__ import check_arguments

KILLED_AFTER = 15.0  # seconds behind the limit that a line itself knows
POLL = 2.0  # seconds between looks at what a line has written
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
    "F": Part(
        "what conformance tries, and programs of users",
        330.0,
        (("suite-operators",), ("suite-silent",), ("suite-architectures",), ("suite-stateful",),
         ("doors", "suite-programs")),
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

    def put(self, key: str, made: dict[str, Any]) -> None:
        """Write what there is of a line."""
        with self._lock:
            self._known[key] = made
            beside = self._lines.with_suffix(".part")
            beside.write_text(json.dumps(self._known, indent=1), encoding="utf-8")
            beside.replace(self._lines)

    def add(self, key: str, made: dict[str, Any], printed: str) -> None:
        """Write what came of a line."""
        self.put(key, made)
        with self._lock, self._log.open("a", encoding="utf-8") as log:
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
            status = _followed(process, start + seconds + KILLED_AFTER, Path(folder), key, results)
        made = _read(Path(folder), key)
        made = made or {"status": "failed", "error": f"no result, status {status}"}
        made["whole seconds"] = time.monotonic() - start
        results.add(key, made, log.read_text(errors="replace"))


def _followed(
    process: subprocess.Popen[bytes], end: float, folder: Path, key: str, results: Results
) -> int | None:
    """Return the status of a line's process, None where it was ended; writes what comes of it."""
    written = None
    while True:
        try:
            return process.wait(max(0.0, min(POLL, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                os.killpg(process.pid, 9)
                process.wait()
                return None
        if (made := _read(folder, key)) is not None and made != written:
            results.put(key, made)
            written = made


def _read(folder: Path, key: str) -> dict[str, Any] | None:
    """Return what a line's process has written so far."""
    for path in folder.glob("*.json"):
        return json.loads(path.read_text(encoding="utf-8"))["lines"].get(key)
    return None


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
    parser.add_argument("part", nargs="?", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--lane", action="append", default=[], help="keys by commas, repeatable")
    parser.add_argument("--seconds", type=float, help="in place of the part's own")
    parser.add_argument("--output", type=Path, required=True, help="folder for what comes back")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--profile", action="store_true", help="kernels of a step in speed lines")
    parser.add_argument("--peers", help="sides, by commas; eager,compile,ortrain")
    parser.add_argument("--rounds", help="turns of each side; 5")
    parser.add_argument("--device", help="cuda:0")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # before the part, for which the value of an unknown option would be taken
        parser.error(f"unknown option: {' '.join(unknown)}")
    if options.part not in (None, *PARTS):
        parser.error(f"unknown part {options.part}; there are {', '.join(PARTS)}")
    if (options.part is None) == (not options.lane):
        parser.error("name a part, or lanes")
    if options.part is not None:
        part = PARTS[options.part]
    else:
        part = Part("lanes", 300.0, [lane.split(",") for lane in options.lane])
    given = list(part.arguments)
    for name in ("peers", "rounds", "device"):
        if (value := getattr(options, name)) is not None:
            given += [f"--{name}", value]
    given += [f"--{name}" for name in ("rehearse", "profile") if getattr(options, name)]
    keys = ",".join(key for lane in part.lanes for key in lane)
    check_arguments(["--only", keys, *given])
    run_lanes(part.lanes, options.seconds or part.seconds, given, Results(options.output))
    for key, made in json.loads((options.output / "lines.json").read_text()).items():
        error = str(made.get("error", "")).strip().splitlines()
        figures = {a["figure"]: a["value"] for a in made.get("aims", ())}
        sys.stdout.write(f"{key}: {made['status']} {figures} {error[-1] if error else ''}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
