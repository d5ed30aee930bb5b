# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What users do with a module on a device, each in PyTorch and with ORTModule, in a process of its own."""

from __future__ import annotations

import concurrent.futures
import math
import os
from typing import Any

from benchmarks.gpu_all.line import Aim, Line, Run
from benchmarks.gpu_all.smoke import caught
from benchmarks.worker import TIME_LIMIT, Worker, WorkerError

PROCESSES = 6
_REHEARSED = ("accumulation", "checkpointed", "pure_half")
_TOLERANCES = {"float64": 1e-6, "float32": 2e-4, "float16": 1e-2, "bfloat16": 4e-2}


# --- in a worker


def check(name: str, device: str) -> dict[str, Any]:
    """Run one program of ``benchmarks.gpu_all.programs`` both ways and compare what it returns."""
    import torch

    from benchmarks.gpu_all.programs import PROGRAMS, Wrap
    from ortrain import ORTModule

    program = PROGRAMS[name]
    cudnn = torch.backends.cudnn
    # In which two right results differ.
    exactly = cudnn.flags(
        enabled=cudnn.enabled, deterministic=cudnn.deterministic, allow_tf32=False
    )

    def work() -> dict[str, Any]:
        found = []
        for way in (Wrap(), Wrap(ORTModule)):
            torch.manual_seed(0)
            found.append(program(way, device))
            wrapped = way.made
        theirs, ours = found
        apart = {}
        for key in theirs.keys() | ours.keys():
            if key not in ours or key not in theirs:
                apart[key] = "on one side alone"
            elif told := difference(ours[key], theirs[key]):
                apart[key] = told
        reasons = [c.fallback for m in wrapped for c in m.report().captures if c.fallback]
        native = [m.report().native_share for m in wrapped]
        return {"right": not apart, "apart": apart, "in PyTorch": reasons[:3], "native": native}

    with exactly:
        return caught(work)


def difference(ours: Any, theirs: Any) -> str:
    """Return how two values differ, "" where they are close: by norm, to what the type has."""
    import torch

    if not isinstance(theirs, torch.Tensor):
        if isinstance(theirs, float) and isinstance(ours, float):
            close = math.isclose(ours, theirs, rel_tol=2e-3, abs_tol=1e-4)
            return "" if close else f"{ours}, expected {theirs}"
        return "" if ours == theirs else f"{ours}, expected {theirs}"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype or ours.device != theirs.device:
        told = [f"{t.dtype} {list(t.shape)} on {t.device}" for t in (ours, theirs)]
        return f"{told[0]}, expected {told[1]}"
    if not theirs.is_floating_point():
        return "" if torch.equal(ours, theirs) else "other values"
    a, b = ours.detach().double(), theirs.detach().double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return "other values are finite"
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    tolerance = _TOLERANCES[str(theirs.dtype).removeprefix("torch.")]
    apart, size = float((a - b).norm()), float(b.norm())
    return "" if apart <= tolerance * size + 1e-5 else f"{apart:.2e} apart, of {size:.2e}"


# --- in the program


def measure(run: Run) -> dict[str, Any]:
    """Run all programs, several at once."""
    from benchmarks.gpu_all.programs import PROGRAMS, alone

    names = [n for n in PROGRAMS if not run.rehearsal or n in _REHEARSED]

    def one(name: str) -> dict[str, Any]:
        try:
            with Worker(run.environment(), 1, run.deadline) as worker:
                run.say(name)
                return worker.ask(
                    "call", function="gpu_all.doors:check", name=name, device=run.device
                )
        except WorkerError as error:
            return {"right": False, "error": str(error)}

    together = [name for name in names if name not in alone()]
    processes = min(PROCESSES, max(1, (os.cpu_count() or 1) // 2))
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        made = dict(zip(together, pool.map(one, together), strict=True))
    for name in names:
        if name not in made:  # takes much of the device's memory
            made[name] = one(name)
    return figures(made)


def figures(made: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of what was made of each program; those cut off are neither right nor not."""
    cut_off = [name for name, each in made.items() if TIME_LIMIT in each.get("error", "")]
    found = {
        "wrong": sum(not each["right"] for name, each in made.items() if name not in cut_off),
        "compared": len(made) - len(cut_off),
        "in PyTorch": [name for name, each in made.items() if each.get("in PyTorch")],
        "programs": made,
    }
    if cut_off:
        found["unfinished"] = f"cut off by the time: {', '.join(cut_off)}"
    return found


LINES: tuple[Line, ...] = (
    Line(
        "doors",
        "doors",
        "What users do with a module on a device, beside PyTorch",
        (Aim("wrong", 0, most=True),),
        300.0,
        measure,
        check=True,
    ),
)
