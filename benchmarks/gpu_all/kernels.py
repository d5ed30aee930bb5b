# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What bounds each kernel of a step of GPT-2: memory, arithmetic, or neither, by Nsight Compute.

As a program, ``python -m benchmarks.gpu_all.kernels``, it is what ncu watches: some steps, then one
between the profiler's start and stop.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import ROOT, package_path
from benchmarks.gpu_all.line import Line, Run, find_tool
from benchmarks.gpu_all.speed import tiny
from benchmarks.workloads import Workload

WORKLOAD = Workload("gpt2", 8, 1024)  # also of the line `profile`
MOST_KERNELS = 40
LAUNCHES = 120  # each takes a large part of a second
_METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "arithmetic %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy %",
    "launch__registers_per_thread": "registers",
}


def summarize(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return kernels of ncu's CSV by their whole time, longest first, with means by time."""
    total: dict[str, dict[str, float]] = {}
    launches: dict[tuple[str, str], dict[str, float]] = {}
    for row in csv.DictReader(lines):
        name = _METRICS.get(row.get("Metric Name", ""))
        if name is not None:
            value = float(row["Metric Value"].replace(",", ""))
            unit = row.get("Metric Unit", "")
            scale = {"us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6}.get(unit, 1.0)
            launches.setdefault((row["ID"], row["Kernel Name"]), {})[name] = value * scale
    for (_, kernel), figures in launches.items():
        time = figures.get("ns", 0.0)
        entry = total.setdefault(kernel, {"ns": 0.0, "launches": 0})
        entry["ns"] += time
        entry["launches"] += 1
        for name, value in figures.items():
            if name != "ns":
                entry[name] = entry.get(name, 0.0) + value * time
    rows = []
    for kernel, entry in sorted(total.items(), key=lambda item: -item[1]["ns"]):
        means = {
            name: value / entry["ns"] if entry["ns"] else 0.0
            for name, value in entry.items()
            if name not in ("ns", "launches")
        }
        made = {"kernel": kernel[:160], "us": entry["ns"] / 1e3, "launches": entry["launches"]}
        rows.append(made | {name: round(value, 1) for name, value in means.items()})
    return rows


def measure(run: Run) -> dict[str, Any]:
    """Profile the first launches of a step, without recordings, each kernel by itself."""
    program = [sys.executable, "-m", "benchmarks.gpu_all.kernels", "--device", run.device]
    if run.rehearsal:
        command = [*program, "--rehearse"]
    else:
        ncu = find_tool("ncu")
        if ncu is None:
            raise FileNotFoundError("ncu was not found on PATH or beside CUDA")
        command = [
            *(ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv"),
            *("--print-units", "base", "--launch-count", str(LAUNCHES)),
            *("--metrics", ",".join(_METRICS), *program),
        ]
    run.say("ncu")
    made = subprocess.run(
        command,
        cwd=ROOT,
        env={
            **os.environ,
            **run.environment(),
            "ORTRAIN_GPU_GRAPHS": "0",
            "PYTHONPATH": package_path(os.environ.get("PYTHONPATH")),
        },
        capture_output=True,
        text=True,
        timeout=run.seconds_left(),
        check=False,
    )
    if made.returncode:
        last = ((made.stdout + made.stderr).strip().splitlines() or ["nothing printed"])[-1]
        raise RuntimeError(f"status {made.returncode}: {last}")
    lines = made.stdout.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels = summarize(lines[head:])
    return {"kernels": kernels[:MOST_KERNELS], "launches": sum(k["launches"] for k in kernels)}


def trained(device: str, *, rehearsal: bool) -> tuple[Any, Callable[[], Any]]:
    """Return the engine's side of the work and its step under bf16 autocast, after some steps."""
    from benchmarks.peers import PEERS, make_step

    workload = tiny(WORKLOAD) if rehearsal else WORKLOAD
    side = PEERS["ortrain"].make(workload.build(device))
    step = make_step(side, workload.make_batch(), "bf16", device)
    for _ in range(4):
        step()
    return side, step


def main(arguments: list[str] | None = None) -> int:
    """Train; prints the last loss."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_all.kernels")
    parser.add_argument("--device", required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    _, step = trained(options.device, rehearsal=options.rehearse)
    on_device = torch.device(options.device).type == "cuda"
    if on_device:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    loss = float(step())
    if on_device:
        torch.cuda.profiler.stop()
    sys.stdout.write(json.dumps({"loss": loss}) + "\n")
    return 0


LINES: tuple[Line, ...] = (
    Line(
        "kernels", "kernels", "Kernels of a step of GPT-2 124M, 8×1024, by ncu", (), 240.0, measure
    ),
)


if __name__ == "__main__":
    sys.exit(main())
