# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The largest batch that a side can train on, and what a sample takes then."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.compare import peer_caches
from benchmarks.gpu_all.line import Aim, Line, Run
from benchmarks.gpu_all.speed import GPT2_MEDIUM, OURS, tiny
from benchmarks.peers import PEERS
from benchmarks.worker import Worker, WorkerError
from benchmarks.workloads import Workload

WORKLOAD = Workload("gpt2", 16, 1024, overrides=GPT2_MEDIUM)
MOST_TRIALS = 9
_REHEARSAL_ROWS = {"eager": 5, "compile": 8, "ortrain": 11}

Attempt = Callable[[int], dict[str, Any]]


def largest_batch(attempt: Attempt, first: int, capacity: int) -> dict[int, dict[str, Any]]:
    """Look for the largest batch that fits, to within a 32nd.

    The peaks of two batches give the line along which memory grows, and that the batch to try next.

    Args:
      attempt: Returns "fits", and then "peak_bytes" and "seconds", for a batch.
      first: Where to begin.
      capacity: Bytes of memory.

    Returns:
      What each batch that fitted gave, by batch.
    """
    fitting: dict[int, dict[str, Any]] = {}
    too_large: int | None = None

    def attempted(batch: int) -> bool:
        nonlocal too_large
        made = attempt(batch)
        if made["fits"]:
            fitting[batch] = made
        else:
            too_large = batch
        return made["fits"]

    batch = first
    while not attempted(batch):
        if batch == 1:
            return fitting
        batch //= 2
    if too_large is None:
        attempted(2 * batch)
    for _ in range(MOST_TRIALS):
        low = max(fitting)
        if too_large is None:
            attempted(max(_extrapolated(fitting, capacity), low + max(1, low // 24)))
        elif too_large - low > max(1, low // 32):
            attempted((low + too_large) // 2)
        else:
            break
    return fitting


def _extrapolated(fitting: dict[int, dict[str, Any]], capacity: int) -> int:
    """Return the batch that a line through what was seen gives; 0 where it gives none."""
    low, high = min(fitting), max(fitting)
    growth = fitting[high]["peak_bytes"] - fitting[low]["peak_bytes"]
    if growth <= 0:
        return 2 * high
    room = capacity - fitting[high]["peak_bytes"]
    # Of what is left, all but a little that allocators leave unused.
    return high + int(0.97 * room * (high - low) / growth) if room > 0 else 0


def _search(peer: str, run: Run, caches: dict[str, str]) -> dict[str, Any]:
    """Return the largest batch of a side in a fresh process, and the seconds of a sample there."""
    workload = tiny(WORKLOAD) if run.rehearsal else WORKLOAD
    first = dataclasses.replace(workload, batch=workload.batch // 2)
    environment = {**PEERS[peer].environment, **caches}
    with Worker(environment, 1 if run.rehearsal else None, run.deadline) as worker:
        worker.ask(
            "build",
            workload=dataclasses.asdict(first),
            peer=peer,
            dtype="bf16",
            device=run.device,
        )
        capacity = worker.ask("call", function="resources:memory_of", device=run.device)

        def attempt(batch: int) -> dict[str, Any]:
            run.say(f"largest batch, {peer}: {batch}")
            return worker.ask(
                "trial",
                workload=dataclasses.asdict(dataclasses.replace(workload, batch=batch)),
                dtype="bf16",
                most_rows=_REHEARSAL_ROWS[peer] if run.rehearsal else None,
            )

        if run.rehearsal:
            capacity = 0  # memory of the process says nothing there
        fitting = largest_batch(attempt, first.batch, capacity)
    if not fitting:
        raise WorkerError(f"not one row of {workload.name} fits")
    largest, least = max(fitting), min(fitting)
    usual = fitting.get(workload.batch, fitting[least])
    usual_batch = workload.batch if workload.batch in fitting else least
    return {
        "batch": largest,
        "peak_bytes": fitting[largest]["peak_bytes"],
        "seconds_per_sample": fitting[largest]["seconds"] / largest,
        "usual_batch": usual_batch,
        "usual_seconds_per_sample": usual["seconds"] / usual_batch,
        "capacity": capacity,
    }


def measure(run: Run) -> dict[str, Any]:
    """Compare the largest batches of all sides, one after the other: each has the whole memory."""
    sides: dict[str, dict[str, Any]] = {}
    errors = []
    with contextlib.ExitStack() as stack:
        caches = peer_caches(stack, cold=False)
        for peer in run.peers:
            try:
                sides[peer] = _search(peer, run, caches)
            except WorkerError as error:
                errors.append(f"{peer}: {error}")
    figures: dict[str, Any] = {"sides": sides}
    if OURS in sides:
        ours = sides[OURS]
        figures["batch"] = ours["batch"]
        figures["time of a sample, of that at 16"] = (
            ours["seconds_per_sample"] / ours["usual_seconds_per_sample"]
        )
        for peer in sides.keys() - {OURS}:
            figures[f"batch × {peer}'s"] = ours["batch"] / sides[peer]["batch"]
            figures[f"time of a sample, of {peer}'s at its largest"] = (
                ours["seconds_per_sample"] / sides[peer]["seconds_per_sample"]
            )
    return figures | ({"error": "; ".join(errors)} if errors else {})


LINES: tuple[Line, ...] = (
    Line(
        "largest-batch",
        "memory",
        "Largest batch of GPT-2 medium ×1024 at equal time of a sample",
        (
            Aim("batch × eager's", 3.0),
            Aim("batch × compile's", 1.5),
            Aim("time of a sample, of that at 16", 1.05, most=True),
        ),
        500.0,
        measure,
    ),
)
