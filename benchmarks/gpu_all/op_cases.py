# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The cases of all operators on the kernels of a device, by a program without PyTorch.

``ortrain_check_kernels`` (tools/check_device_kernels.cpp) compares values with the CPU's "ref" and
gradients with the CPU's. Several of it work at once; what one cannot go on after is recorded, and
another takes the cases behind it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.gpu_all.line import Aim, Line, Run, find_tool

# Whatever cuDNN has an algorithm for: each kernel that takes a case is checked, also those that
# another goes before.
_SETTINGS = {"ORTRAIN_CUDNN": "all"}
PROGRAM = "ortrain_check_kernels"
MOST_SHOWN = 400
SILENCE = 60.0  # seconds after which a case counts as one that does not end
_COUNTS = ("cases", "passed", "failed", "refused")
_REHEARSED = ["--only", "Softmax/"]


def find_program() -> str:
    """Return the path of the program: ``ORTRAIN_CHECK_KERNELS``, or the build's.

    Raises:
      FileNotFoundError: It has not been built.
    """
    named = os.environ.get("ORTRAIN_CHECK_KERNELS")
    path = Path(named) if named else ROOT / "build" / PROGRAM
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: cmake --build build --target {PROGRAM}")
    return str(path)


def library_folders() -> list[str]:
    """Return the folders of NVIDIA's libraries among Python's packages."""
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    return sorted({str(lib) for root in roots for lib in Path(root).glob("*/lib")})


def environment_of_program() -> dict[str, str]:
    """Return what the program runs in: it finds the libraries that PyTorch would have loaded."""
    paths = [*library_folders(), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, **_SETTINGS, "LD_LIBRARY_PATH": os.pathsep.join(paths)}


@dataclasses.dataclass(slots=True)
class Found:
    """What the checks of a line found."""

    counts: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    largest: float = 0.0
    messages: list[str] = dataclasses.field(default_factory=list)
    left_out: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def fail(self, message: str) -> None:
        """Record something that is wrong."""
        with self.lock:
            self.counts["failed"] += 1
            self.messages.append(message)

    def add(self, summary: Mapping[str, Any]) -> None:
        """Add the last line of a program; its failures have been recorded one by one."""
        with self.lock:
            for key in ("passed", "refused"):
                self.counts[key] += summary[key]
            self.largest = max(self.largest, summary["largest"])
            self.left_out += summary["left_out"]

    def figures(self) -> dict[str, Any]:
        """Return them as those of a line."""
        return {
            **self.counts,
            "largest": self.largest,
            "left out": self.left_out,
            "messages": self.messages[:MOST_SHOWN],
        }


def _watched(
    command: Sequence[str], deadline: float, on_line: Callable[[dict[str, Any]], None]
) -> tuple[int | None, str]:
    """Run a program that prints lines of JSON; end it at the deadline or after a long silence.

    Returns:
      Its status, None where it was ended, and the last line of its errors.
    """
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment_of_program(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        heard = time.monotonic()
        ended = threading.Event()

        def watch() -> None:
            while process.poll() is None:
                now = time.monotonic()
                if now > deadline or now - heard > SILENCE:
                    ended.set()
                    process.kill()
                time.sleep(0.1)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        for text in process.stdout:
            heard = time.monotonic()
            if text.startswith("{"):
                on_line(json.loads(text))
        errors = process.stderr.read().strip().splitlines()
        status = process.wait()
        watcher.join()
    return (None if ended.is_set() else status), errors[-1] if errors else ""


@dataclasses.dataclass(slots=True)
class _Progress:
    """How far one process of the program has come."""

    found: Found
    at: dict[str, Any] | None = None  # the case that was begun last
    failed: bool = False  # in that case
    done: bool = False

    def hear(self, line: dict[str, Any]) -> None:
        """Take one line that it printed."""
        if "at" in line:
            self.at, self.failed = line, False
            with self.found.lock:
                self.found.counts["cases"] += 1
        elif "kernel" in line:
            self.failed = True
            self.found.fail(f"{line['case']} {line['kernel']} {line['type']}: {line['message']}")
        else:
            self.done = True
            self.found.add(line)


def check_part(command: Sequence[str], part: str, deadline: float, found: Found) -> None:
    """Check one part of the cases, going on behind each that a process does not survive."""
    after: list[str] = []
    while True:
        progress = _Progress(found)
        seconds = ["--seconds", f"{max(0.1, deadline - time.monotonic() - 2):.1f}"]
        status, error = _watched(
            [*command, "--part", part, *seconds, *after], deadline, progress.hear
        )
        if progress.done:
            return
        late = time.monotonic() >= deadline
        if progress.at is None or late:
            if not late:
                found.fail(f"part {part}: status {status}: {error}")
            with found.lock:
                found.left_out += 1  # at least
            return
        case = progress.at["case"]
        if status is None:
            found.fail(f"{case}: no answer in {SILENCE:.0f} s")
        elif progress.failed:
            found.messages.append(f"{case}: the device takes no more work after it")
        else:
            found.fail(f"{case}: the process ended with status {status}: {error}")
        after = ["--after", str(progress.at["at"])]


def check_all(arguments: Sequence[str], processes: int, deadline: float) -> Found:
    """Check the cases that the program's arguments name, by several processes at once."""
    found = Found()
    command = [find_program(), *arguments]
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        parts = [
            pool.submit(check_part, command, f"{i}/{processes}", deadline, found)
            for i in range(processes)
        ]
        for part in parts:
            part.result()
    return found


def _processes(run: Run) -> int:
    return 1 if run.rehearsal else max(1, min(12, (os.cpu_count() or 1) - 2))


def _measure(run: Run, what: str) -> dict[str, Any]:
    from ortrain import _core

    kernels = _core.device_kernels(run.provider)
    on_host = sorted(op for op, names in kernels.items() if names == ["host"])
    run.say("cases")
    arguments = [what, *(_REHEARSED if run.rehearsal else [])]
    found = check_all(arguments, _processes(run), run.deadline - 5)
    return found.figures() | {"operators without a kernel here": on_host}


def measure_values(run: Run) -> dict[str, Any]:
    """Run every kernel of every case, for every type, and every refusal."""
    return _measure(run, "values")


def measure_gradients(run: Run) -> dict[str, Any]:
    """Compare gradient rules on the device with the CPU's gradients."""
    return _measure(run, "gradients")


# --- under compute-sanitizer


def measure_sanitized(run: Run, *, tool: str) -> dict[str, Any]:
    """Run cases of the provider's own kernels under a tool of compute-sanitizer.

    Each process has a part of the cases, as many as fit into the time.
    """
    sanitizer = None if run.rehearsal else find_tool("compute-sanitizer")
    if sanitizer is None and not run.rehearsal:
        raise FileNotFoundError("compute-sanitizer was not found on PATH or beside CUDA")
    watched = [] if sanitizer is None else [sanitizer, "--tool", tool, "--print-limit", "20"]
    seconds = 5.0 if run.rehearsal else 0.6 * run.seconds_left()
    processes = max(1, _processes(run) // 3)  # its tools may run side by side
    run.say(f"compute-sanitizer, {tool}")

    def one(part: int) -> tuple[str, dict[str, Any] | None]:
        command = [
            *(*watched, find_program(), "values", "--own"),
            *("--part", f"{part}/{processes}", "--seconds", str(seconds)),
            *(_REHEARSED if run.rehearsal else []),
        ]
        # An error of CUDA in the program would be a report of its own.
        made = subprocess.run(
            command,
            cwd=ROOT,
            # What is wrong with others' kernels says nothing about these: cuDNN's gradients of
            # attention were seen to fail synccheck.
            env=environment_of_program() | {"ORTRAIN_CUDNN": "off"},
            capture_output=True,
            text=True,
            timeout=run.seconds_left(),
            check=False,
        )
        lines = [line for line in made.stdout.splitlines() if line.startswith('{"cases"')]
        return made.stdout + made.stderr, json.loads(lines[-1]) if lines else None

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        try:
            made = list(pool.map(one, range(processes)))
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"not done in {error.timeout:.0f} s") from error
    return sanitized_figures(made, rehearsal=run.rehearsal)


def sanitized_figures(
    made: Sequence[tuple[str, dict[str, Any] | None]], *, rehearsal: bool
) -> dict[str, Any]:
    """Return the figures of what several processes printed, and their last lines."""
    figures: dict[str, Any] = dict.fromkeys((*_COUNTS, "left out", "errors"), 0)
    reports: list[str] = []
    broken = 0
    for text, summary in made:
        # Where the device takes no more work there is no last line; the reports say why.
        for key in _COUNTS if summary else ():
            figures[key] += summary[key]
        figures["left out"] += summary["left_out"] if summary else 0
        broken += summary is None
        counted = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", text)
        if counted is None and not rehearsal:
            figures["error"] = "compute-sanitizer printed no summary"
        elif counted and int(counted[1]):
            figures["errors"] += int(counted[1])
            reports += [
                line for line in text.splitlines() if line.startswith(("=========", '{"at"'))
            ]
    if broken:
        figures["processes that did not end well"] = broken
    return figures | ({"reports": reports[:MOST_SHOWN]} if reports else {})


def _sanitizer_line(tool: str) -> Line:
    return Line(
        f"op-{tool}",
        "sanitizer",
        f"Cases of the provider's own kernels under compute-sanitizer's {tool}",
        (Aim("errors", 0, most=True), Aim("failed", 0, most=True)),
        160.0,
        functools.partial(measure_sanitized, tool=tool),
        check=True,
    )


LINES: tuple[Line, ...] = (
    Line(
        "op-cases",
        "ops",
        "Cases of all operators on the device against the CPU's reference",
        (Aim("failed", 0, most=True), Aim("left out", 0, most=True)),
        200.0,
        measure_values,
        check=True,
    ),
    Line(
        "op-gradients",
        "ops",
        "Gradients of all operators on the device against the CPU's",
        (Aim("failed", 0, most=True), Aim("left out", 0, most=True)),
        120.0,
        measure_gradients,
        check=True,
    ),
    _sanitizer_line("memcheck"),
    _sanitizer_line("racecheck"),
    _sanitizer_line("synccheck"),
)
