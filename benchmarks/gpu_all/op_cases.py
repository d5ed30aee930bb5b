# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The cases of all operators on the kernels of a device, against the CPU's "ref".

As a program, ``python -m benchmarks.gpu_all.op_cases``, it runs what fits into some seconds and
prints one line of JSON: compute-sanitizer watches it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import ROOT, package_path
from benchmarks.gpu_all.line import Aim, Line, Run
from benchmarks.worker import Worker, WorkerEndedError

# Whatever cuDNN has an algorithm for: each kernel that takes a case is checked, also those that
# another goes before.
_SETTINGS = {"ORTRAIN_CUDNN": "all"}
CHUNK = 100  # cases per request: what a process that ends takes with it is run again in halves
MOST_SHOWN = 40
_REHEARSED_CASES = 30
_SANITIZER_PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")


def chosen(provider: str, *, gradient: bool, own: bool) -> list[int]:
    """Return cases in an order that spreads operators.

    Args:
      provider: The engine's name of the device.
      gradient: Those whose gradient can be checked.
      own: Those of operators that the provider has a kernel of its own for.
    """
    from ortrain import _core

    kernels = _core.device_kernels(provider)
    cases = _core.op_cases()

    def is_own(op: str) -> bool:
        return any(name not in ("host", "view") for name in kernels[op])

    indices = [
        index
        for index, case in enumerate(cases)
        if (not gradient or case["has_gradient_check"]) and (not own or is_own(case["op"]))
    ]
    random.Random(0).shuffle(indices)
    return indices


def check(provider: str, indices: Sequence[int], gradient: bool) -> dict[str, Any]:
    """Check some cases in this process, until the device refuses all further work.

    Returns:
      Counts "passed", "failed" and "refused" of kernels and types; "messages" of what failed;
      "largest" difference; "done": how many cases were checked.
    """
    from ortrain import _core

    found: dict[str, Any] = {"passed": 0, "failed": 0, "refused": 0, "largest": 0.0, "messages": []}
    done = 0
    for index in indices:
        try:
            if gradient:
                rows = [_core.check_case_gradient(index, provider)]
            else:
                rows = _core.check_case(index, provider)
        except Exception as error:
            # A case that cannot even be set up counts as one that failed.
            name = _core.op_cases()[index]
            rows = [_unmade(f"{name['op']}/{name['name']}", error)]
        done += 1
        for row in rows:
            if row["refused"]:
                found["refused"] += 1
            elif row["passed"]:
                found["passed"] += 1
                found["largest"] = max(found["largest"], row["difference"])
            else:
                found["failed"] += 1
                found["messages"].append(
                    f"{row['name']} {row['kernel']} {row['type']}: {row['message']}"
                )
        if any(not row["passed"] and not row["refused"] for row in rows) and not _works(provider):
            found["messages"].append(f"{rows[0]['name']}: the device takes no more work after it")
            break
    return found | {"done": done}


def _unmade(name: str, error: Exception) -> dict[str, Any]:
    message = f"{type(error).__name__}: {error}"
    row = {"name": name, "kernel": "", "type": "", "passed": False, "refused": False}
    return row | {"difference": 0.0, "message": message}


def _works(provider: str) -> bool:
    if not provider.startswith("cuda"):
        return True
    import torch

    try:
        return torch.ones(1, device=provider).item() == 1
    except RuntimeError:
        return False


def check_all(run: Run, indices: Sequence[int], gradient: bool) -> dict[str, Any]:
    """Check cases in workers; a case that ends the process fails, the others are checked."""
    total: dict[str, Any] = {"passed": 0, "failed": 0, "refused": 0, "largest": 0.0, "messages": []}
    waiting = [list(indices[i : i + CHUNK]) for i in range(0, len(indices), CHUNK)][::-1]
    checked = 0
    worker: Worker | None = None
    try:
        while waiting and time.monotonic() < run.deadline - 1:
            part = waiting.pop()
            run.say(f"{checked} of {len(indices)} cases")
            if worker is None:
                worker = Worker({**run.environment(), **_SETTINGS}, None, run.deadline)
            try:
                made = worker.ask(
                    "call",
                    function="gpu_all.op_cases:check",
                    provider=run.provider,
                    indices=part,
                    gradient=gradient,
                )
            except WorkerEndedError as error:
                worker.close()
                worker = None
                if time.monotonic() >= run.deadline - 1:
                    waiting.append(part)
                elif len(part) > 1:
                    middle = len(part) // 2
                    waiting += [part[middle:], part[:middle]]
                else:
                    checked += 1
                    total["failed"] += 1
                    total["messages"].append(f"case {part[0]}: {error}")
                continue
            for key in ("passed", "failed", "refused"):
                total[key] += made[key]
            total["largest"] = max(total["largest"], made["largest"])
            total["messages"] += made["messages"]
            checked += made["done"]
            if made["done"] < len(part):
                waiting.append(part[made["done"] :])
                worker.close()
                worker = None
    finally:
        if worker is not None:
            worker.close()
    total["messages"] = total["messages"][:MOST_SHOWN]
    return total | {"cases": checked, "left out": len(indices) - checked}


def _measure(run: Run, *, gradient: bool) -> dict[str, Any]:
    from ortrain import _core

    indices = chosen(run.provider, gradient=gradient, own=False)
    if run.rehearsal:
        indices = indices[:_REHEARSED_CASES]
    kernels = _core.device_kernels(run.provider)
    on_host = sorted(op for op, names in kernels.items() if names == ["host"])
    figures = check_all(run, indices, gradient)
    return figures | {"operators without a kernel here": on_host}


def measure_values(run: Run) -> dict[str, Any]:
    """Run every kernel of every case, for every type, and every refusal."""
    return _measure(run, gradient=False)


def measure_gradients(run: Run) -> dict[str, Any]:
    """Compare gradient rules with central differences."""
    return _measure(run, gradient=True)


# --- under compute-sanitizer


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, or None."""
    path = os.pathsep.join((os.environ.get("PATH", ""), *_SANITIZER_PLACES))
    return shutil.which("compute-sanitizer", path=path)


def run_sanitizer(
    command: Sequence[str], environment: Mapping[str, str], seconds: float
) -> tuple[str, dict[str, Any]]:
    """Run a command that prints JSON last; return all that was printed, and that.

    Raises:
      RuntimeError: It printed none.
      subprocess.TimeoutExpired: It took longer than ``seconds``.
    """
    made = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    text = made.stdout + made.stderr
    lines = [line for line in made.stdout.splitlines() if line.startswith("{")]
    if not lines:
        last = (text.strip().splitlines() or ["nothing printed"])[-1]
        raise RuntimeError(f"status {made.returncode}: {last}")
    return text, json.loads(lines[-1])


def measure_sanitized(run: Run) -> dict[str, Any]:
    """Run cases of the provider's own kernels under compute-sanitizer's memcheck."""
    tool = None if run.rehearsal else find_sanitizer()
    if tool is None and not run.rehearsal:
        raise FileNotFoundError("compute-sanitizer was not found on PATH or beside CUDA")
    seconds = 5.0 if run.rehearsal else 0.6 * run.seconds_left()
    watched = [] if tool is None else [tool, "--tool", "memcheck", "--print-limit", "20"]
    command = [
        *watched,
        *(sys.executable, "-m", "benchmarks.gpu_all.op_cases"),
        *("--provider", run.provider, "--seconds", str(seconds)),
    ]
    # Each tensor an allocation of its own: what lies beside it is not the program's.
    path = package_path(os.environ.get("PYTHONPATH"))
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path, **_SETTINGS}
    run.say("compute-sanitizer")
    try:
        text, found = run_sanitizer(command, environment, run.seconds_left())
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"not done in {error.timeout:.0f} s") from error
    summary = re.search(r"ERROR SUMMARY: (\d+) error", text)
    figures = found | {"errors": int(summary[1]) if summary else None}
    if summary is None and not run.rehearsal:
        figures["error"] = "compute-sanitizer printed no summary"
    elif summary and int(summary[1]):
        reports = [line for line in text.splitlines() if line.startswith("=========")]
        figures["reports"] = reports[:200]
    return figures


def main(arguments: list[str] | None = None) -> int:
    """Check what fits into some seconds; prints one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_all.op_cases")
    parser.add_argument("--provider", required=True, help="cuda:0 or simulator")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    indices = chosen(options.provider, gradient=False, own=True)
    total: dict[str, Any] = {"passed": 0, "failed": 0, "cases": 0, "messages": []}
    for index in indices:
        if time.monotonic() > end:
            break
        made = check(options.provider, [index], gradient=False)
        for key in ("passed", "failed"):
            total[key] += made[key]
        total["messages"] += made["messages"]
        total["cases"] += 1
    total["messages"] = total["messages"][:MOST_SHOWN]
    sys.stdout.write(json.dumps(total | {"left out": len(indices) - total["cases"]}) + "\n")
    return 0


LINES: tuple[Line, ...] = (
    Line(
        "op-cases",
        "ops",
        "Cases of all operators on the device against the CPU's reference",
        (Aim("failed", 0, most=True), Aim("left out", 0, most=True)),
        300.0,
        measure_values,
        check=True,
    ),
    Line(
        "op-gradients",
        "ops",
        "Gradients of all operators against finite differences, on the device",
        (Aim("failed", 0, most=True), Aim("left out", 0, most=True)),
        300.0,
        measure_gradients,
        check=True,
    ),
    Line(
        "op-sanitizer",
        "sanitizer",
        "Cases of the provider's own kernels under compute-sanitizer",
        (Aim("errors", 0, most=True), Aim("failed", 0, most=True)),
        420.0,
        measure_sanitized,
        check=True,
    ),
)


if __name__ == "__main__":
    sys.exit(main())
