# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""First calls of models with costly sizes: ``python -m benchmarks.first_calls``.

Each model is built, then called and differentiated twice through ORTModule, in a process of its
own. The losses and gradients of both are compared with PyTorch's: where a forward branches on
values, the first runs in PyTorch and the second is captured.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from benchmarks import ROOT, package_path
from benchmarks.costly_captures import MODELS, loss_of, make
from benchmarks.table import add_columns, make_console, seconds
from benchmarks.train_step import write_json
from ortrain import env


def _call(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, float, float]:
    """Return the loss of a forward and backward, and the wall and CPU seconds of both."""
    model.zero_grad(set_to_none=True)
    wall, cpu = time.perf_counter(), time.process_time()
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.detach(), time.perf_counter() - wall, time.process_time() - cpu


def _difference(
    loss: torch.Tensor, ours: nn.Module, expected: torch.Tensor, stock: nn.Module
) -> float:
    """Return how far a loss and the gradients behind it are off, relative to each one's largest."""
    pairs = [(loss, expected)]
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        if theirs.grad is not None:
            pairs.append((mine.grad if mine.grad is not None else theirs.grad * 0, theirs.grad))
    # Gradients that are zero but for rounding count against the largest of all.
    largest = max(float(b.abs().max()) for _, b in pairs)
    return max(
        float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * largest) for a, b in pairs
    )


def first_call(name: str) -> dict[str, Any]:
    """Return what the first calls of a model take in this process, and how far off they are.

    The keys: "wall" and "cpu" of the first forward and backward in seconds, "again" the wall time of
    the second, "stages" in seconds, "whole" whether the model is one graph in the second, "sizes"
    those that are fixed, "difference" of loss and gradients of both calls from PyTorch's, relative
    to the largest value of each.
    """
    from ortrain import ORTModule

    model, inputs = make(name)
    stock = copy.deepcopy(model)
    ours = ORTModule(model)
    loss, wall, cpu = _call(ours, inputs)
    expected, _, _ = _call(stock, inputs)
    differences = [_difference(loss, model, expected, stock)]
    loss, again, _ = _call(ours, inputs)
    expected, _, _ = _call(stock, inputs)
    differences.append(_difference(loss, model, expected, stock))
    report = ours.report()
    stages: dict[str, float] = {}
    for record in [*report.captures, *report.pieces]:
        for stage, taken in record.stages.items():
            stages[stage] = stages.get(stage, 0.0) + taken
    fallback = report.captures[-1].fallback
    return {
        "wall": wall,
        "cpu": cpu,
        "again": again,
        "stages": stages,
        "whole": not fallback,
        "captures": len(report.captures),
        "fallback": fallback,
        "sizes": ", ".join(sorted({r.fixed for r in report.captures} - {""})),
        "native_share": report.native_share,
        "difference": max(differences),
    }


def in_own_process(name: str, threads: int, limit: float) -> dict[str, Any]:
    """Return ``first_call`` of a fresh process; "error" where it failed or took too long."""
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": package_path(os.environ.get("PYTHONPATH")),
    }
    command = [sys.executable, "-m", "benchmarks.first_calls", "--in-this-process", name]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **settings},
            timeout=limit,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"more than {limit:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"ended with status {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 if a model failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_calls", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds per model")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--in-this-process", metavar="MODEL", choices=sorted(MODELS), help=argparse.SUPPRESS
    )
    options = parser.parse_args(arguments)
    if options.in_this_process:
        print(json.dumps(first_call(options.in_this_process)))
        return 0
    names = options.models.split(",")
    if unknown := sorted(set(names) - set(MODELS)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    console = make_console()
    table = Table(title="First forward and backward")
    columns = ("wall", "CPU", "second", "capture", "others", "graph", "sizes", "difference")
    add_columns(table, "model", *columns)
    results: dict[str, Any] = {}
    for name in names:
        with console.status(name):
            row = results[name] = in_own_process(name, options.threads, options.limit)
        if "error" in row:
            table.add_row(name, f"failed: {row['error']}")
            continue
        stages = row["stages"]
        table.add_row(
            name,
            seconds(row["wall"]),
            seconds(row["cpu"]),
            seconds(row["again"]),
            seconds(stages.get("capture", 0.0)),
            seconds(sum(stages.values()) - stages.get("capture", 0.0)),
            "whole" if row["whole"] else "in pieces",
            row["sizes"] or "any",
            f"{row['difference']:.1e}",
        )
    console.print(table)
    if options.json:
        write_json(options.json, {"environment": env.collect(), "rows": results})
    return 1 if any("error" in row for row in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
