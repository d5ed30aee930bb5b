# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory of a step: planned against measured, and against PyTorch: ``python -m benchmarks.memory``.

Measured is how far the resident memory of a fresh process rises above its state between two steps:
in a forward and backward, and in a whole step with clipping and optimizer.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import statistics
import sys
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.options import add_dense_workload, dense_workload_of
from benchmarks.peers import PEERS, Side, make_step
from benchmarks.resources import (
    peak_bytes,
    peak_of,
    reset_peak,
    reset_peak_of,
    resident_bytes,
)
from benchmarks.step_clock import time_steps
from benchmarks.table import add_columns, make_console, mib
from benchmarks.train_step import write_json
from benchmarks.workloads import Workload
from ortrain import env

if TYPE_CHECKING:
    import torch

FULL = 4096  # tokens from which on the share of eager's memory counts
SHARE_TARGET = 0.45
PREDICTION_TARGET = 0.03
ARENA_TARGET = 1.03


def probe(side: Side, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Measure one side in this process; called in a worker."""
    step = make_step(side, batch, "f32")
    step()  # makes the optimizer's state, the graph and what libraries keep
    before = _settle()
    loss = side.model(**batch).loss
    loss.backward()
    del loss
    rise = peak_bytes() - before
    side.optimizer.zero_grad(set_to_none=True)
    before = _settle()
    step()
    result: dict[str, Any] = {
        "forward_backward": rise,
        "step": peak_bytes() - before,
        "resident_before": before,
        "peak": peak_bytes(),
    }
    if hasattr(side.model, "memory_plan"):
        plan = side.model.memory_plan()
        result["plan"] = None if plan is None else dataclasses.asdict(plan)
    return result


def try_batch(
    side: Side, workload: Workload, dtype: str, device: str, most_rows: int | None = None
) -> dict[str, Any]:
    """Train a few steps on the batch of a workload, in a worker.

    Args:
      side: What trains.
      workload: Makes the batch.
      dtype: "f32", or "bf16" for autocast.
      device: PyTorch's name of where it trains.
      most_rows: Larger batches count as ones without memory, for rehearsals on the CPU.

    Returns:
      "fits", and then "peak_bytes", and "seconds": the median of the last steps.
    """
    import torch

    if most_rows is not None and workload.batch > most_rows:
        return {"fits": False}
    side.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    try:
        step = make_step(side, workload.make_batch(), dtype, device)
        for _ in range(2):
            step()
        reset_peak_of(device)
        figures = time_steps(step, 3, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"fits": False}
    return {
        "fits": True,
        "peak_bytes": peak_of(device),
        "seconds": statistics.median(figures["wall"]),
    }


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether it is PyTorch's error, or the engine's, of memory that is not there."""
    import torch

    from ortrain import _core

    known = (torch.OutOfMemoryError, _core.OutOfMemoryError, MemoryError)
    # Compilers wrap the error in one of their own.
    return isinstance(error, known) or "out of memory" in str(error)


def _settle() -> int:
    """Give back what is free, start a new peak, return what is resident."""
    from ortrain import _core

    gc.collect()
    _core.trim_memory()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    return resident_bytes()


def measure(workload: Workload, peer: str, threads: int | None) -> dict[str, Any]:
    """Measure one side in a fresh process; "error" where it failed."""
    from benchmarks.worker import Worker, WorkerError

    with Worker(PEERS[peer].environment, threads) as worker:
        try:
            plain = dataclasses.asdict(workload)
            worker.ask("build", workload=plain, peer=peer, dtype="f32")
            return worker.ask("memory", workload=plain)
        except WorkerError as error:
            return {"error": str(error)}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 if a side failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    add_dense_workload(parser, "gpt2", 4, 1024)
    options = parser.parse_args(arguments)
    workload, peers = dense_workload_of(parser, options)
    console = make_console()
    sides: dict[str, dict[str, Any]] = {}
    for peer in peers:
        with console.status(f"{workload.name}: {peer}"):
            sides[peer] = measure(workload, peer, options.threads)
    table = Table(title=f"Memory of a step, {workload.name}")
    add_columns(table, "side", "forward + backward", "whole step", "peak of the process", "share")
    base = sides[peers[0]]
    for name, side in sides.items():
        if "error" in side:
            table.add_row(name, f"failed: {side['error']}")
            continue
        share = side["step"] / base["step"] if base.get("step") else float("nan")
        table.add_row(
            name,
            *(mib(side[k]) for k in ("forward_backward", "step", "peak")),
            f"{share:.2f}",
        )
    console.print(table)
    for name, side in sides.items():
        if plan := side.get("plan"):
            error = side["forward_backward"] / plan["total_bytes"] - 1
            bound = plan["arena_bytes"] / max(plan["arena_lower_bound"], 1)
            console.print(
                f"{name}: planned {mib(plan['total_bytes'])}, measured {error:+.1%} "
                f"(aim ±{PREDICTION_TARGET:.0%}); arena {mib(plan['arena_bytes'])}, {bound:.3f} of "
                f"its lower bound (aim {ARENA_TARGET})",
                highlight=False,
            )
    tokens = workload.batch * workload.seq
    if tokens >= FULL:
        console.print(f"{tokens} tokens: aim {SHARE_TARGET} of eager's memory", highlight=False)
    if options.json:
        document = {"environment": env.collect(), "workload": dataclasses.asdict(workload)}
        write_json(options.json, document | {"sides": sides})
    return 1 if any("error" in side for side in sides.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
