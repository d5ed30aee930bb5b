# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Time until training runs: ``python -m benchmarks.first_step``.

Every row is the first training step of a fresh process, the model being built already, and what a
batch of another shape costs after that, its first step less a repeated one: of a larger batch, whose
memory is new, and of one in between. CPU time includes child
processes, such as compilers.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.options import add_dense_workload, dense_workload_of
from benchmarks.peers import PEERS
from benchmarks.table import add_columns, make_console, seconds
from benchmarks.train_step import write_json
from benchmarks.worker import Worker, WorkerError
from benchmarks.workloads import MODELS, Workload
from ortrain import env

CACHE_FLAG = "ORTRAIN_CACHE_DIR"


def rows(peers: list[str], folder: str) -> Iterator[tuple[str, str, Mapping[str, str]]]:
    """Return name, peer and environment of each process, in order.

    Args:
      peers: Names of ``PEERS``.
      folder: An empty folder for caches.
    """
    kept = {CACHE_FLAG: f"{folder}/ortrain"}
    compiled = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    for peer in peers:
        if peer == "ortrain":
            yield "ortrain, nothing cached", peer, kept
            yield "ortrain, second process", peer, kept
        elif peer == "compile":
            yield "compile, nothing cached", peer, compiled
            yield "compile, second process", peer, compiled
        else:
            yield peer, peer, PEERS[peer].environment


def measure(
    workload: Workload,
    others: Sequence[Workload],
    peer: str,
    environment: Mapping[str, str],
    threads: int,
) -> dict[str, Any]:
    """Return the figures of one fresh process; "error" where it failed."""
    with Worker(environment, threads) as worker:
        try:
            built = worker.ask(
                "build", workload=dataclasses.asdict(workload), peer=peer, dtype="f32"
            )
            first = worker.ask("first_step")
            steady = worker.ask("steps", count=3)
            costs = []
            for other in others:
                worker.ask("rebatch", workload=dataclasses.asdict(other), dtype="f32")
                changed = worker.ask("first_step")
                repeated = worker.ask("steps", count=5)
                costs.append(changed["wall"] - statistics.median(repeated["wall"]))
        except WorkerError as error:
            return {"error": str(error)}
    return {
        "optimizer": built["optimizer"],
        "first": first,
        "steady": min(steady["wall"]),
        "larger_shape_cost": costs[0],
        "shape_cost": costs[1],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 if a side failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__)
    add_dense_workload(parser, "bert-mlm", 2, 64)
    options = parser.parse_args(arguments)
    workload, peers = dense_workload_of(parser, options)
    if MODELS[options.model].kind in ("image", "vector"):
        others = [dataclasses.replace(workload, batch=options.batch + n) for n in (2, 1)]
    else:
        others = [
            dataclasses.replace(workload, batch=options.batch + 1, seq=options.seq + n)
            for n in (32, 16)
        ]
    console = make_console()
    table = Table(title=f"First step, {workload.name}; then {others[0].name}, {others[1].name}")
    add_columns(
        table, "process", "wall", "CPU", "steady step", "larger shape", "then another", "peak"
    )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ortrain-bench-") as folder:
        for name, peer, environment in rows(peers, folder):
            with console.status(name):
                row = measure(workload, others, peer, environment, options.threads)
            results[name] = row
            if "error" in row:
                table.add_row(name, f"failed: {row['error']}")
                continue
            table.add_row(
                name,
                seconds(row["first"]["wall"]),
                seconds(row["first"]["cpu"]),
                seconds(row["steady"]),
                seconds(max(row["larger_shape_cost"], 0.0)),
                seconds(max(row["shape_cost"], 0.0)),
                f"{row['first']['peak_bytes'] / 2**20:.0f} MiB",
            )
    console.print(table)
    if options.json:
        document = {"environment": env.collect(), "rows": results}
        write_json(options.json, document | {"workload": dataclasses.asdict(workload)})
    return 1 if any("error" in row for row in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
