# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run every workload against every peer: ``make bench`` or ``python -m benchmarks.suite``.

Prints one table of ratios of medians beside what is aimed at, and writes
``benchmarks/results/<cpu>.json`` and ``.html`` after each workload.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import chart
from benchmarks.compare import compare, ratio
from benchmarks.options import add_settings, settings_of
from benchmarks.table import add_columns, make_console, print_sides, seconds
from benchmarks.train_step import write_json
from benchmarks.workloads import Workload
from ortrain import env

OURS = "ortrain"
RESULTS = Path(__file__).resolve().parent / "results"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A workload, and how many times as fast as each peer the engine should be."""

    key: str
    workload: Workload
    targets: Mapping[str, float]


def _targets(eager: float, tuned: float, compiled: float) -> dict[str, float]:
    return {"eager": eager, "tuned": tuned, "compile": compiled}


SUITE: tuple[Entry, ...] = (
    Entry("gpt2", Workload("gpt2", 4, 128), _targets(1.5, 1.2, 1.45)),
    Entry("bert-mlm", Workload("bert-mlm", 4, 128), _targets(1.4, 1.15, 1.35)),
    Entry("bert-mlm-15", Workload("bert-mlm", 4, 128, label_rate=0.15), _targets(1.7, 1.4, 1.6)),
    Entry("bert-cls-50", Workload("bert-cls", 16, 128, density=0.5), _targets(2.2, 1.9, 2.0)),
    Entry("gpt2-small-batch", Workload("gpt2", 1, 64), _targets(2.4, 1.4, 2.2)),
    Entry("gpt2-long", Workload("gpt2", 1, 1024), _targets(1.6, 1.3, 1.5)),
    Entry("llama", Workload("llama", 2, 256), _targets(1.5, 1.25, 1.3)),
    Entry("vit-base", Workload("vit-base", 4, 224), _targets(1.3, 1.1, 1.2)),
    Entry("resnet-50", Workload("resnet-50", 8, 224), _targets(1.1, 1.0, 1.0)),
    Entry("mlp", Workload("mlp", 8, 1), _targets(2.0, 1.5, 1.2)),
    Entry("distilbert", Workload("distilbert", 8, 128), {}),
    Entry("t5-small", Workload("t5-small", 8, 128), {}),
    Entry("minilm", Workload("minilm", 16, 128), {}),
)
ETA_TARGETS = {"gpt2": 0.85}
FIRST_STEP_TARGET = 0.15  # of torch.compile's
FAULTS_TARGET = 100


def result_name(machine: Mapping[str, Any]) -> str:
    """Return the name of the result files of a machine: its processor and vector instructions."""
    cpu = machine["machine"]
    capability = machine["torch"].get("cpu_capability", "")
    text = f"{cpu['cpu']} {cpu.get('cpu_family_model', '')} {capability}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def print_summary(results: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the ratios of all workloads beside what is aimed at."""
    peers = list(dict.fromkeys(p for r in results for p in r["sides"] if p != OURS))
    table = Table(title="Times as fast as each side, by the median step (aim in brackets)")
    add_columns(table, "workload", *peers, "step", "η", "η of tuned", "first/compile", "faults")
    for result in results:
        sides = result["sides"]
        ours = sides.get(OURS, {"error": "not run"})
        cells = [_cell(ratio(result, p, OURS), result["targets"].get(p)) for p in peers]
        if "error" in ours:
            table.add_row(result["workload"]["name"], *cells, "failed")
            continue
        # With kept caches a first step is no first step.
        cold = result["settings"]["cold_compile"]
        first = sides.get("compile", {}).get("first_step") if cold else None
        table.add_row(
            result["workload"]["name"],
            *cells,
            seconds(ours["wall"]["median"]),
            _cell(ours["eta"], result["eta_target"]),
            f"{sides['tuned']['eta']:.2f}" if "eta" in sides.get("tuned", {}) else "–",
            _cell(ours["first_step"]["wall"] / first["wall"], FIRST_STEP_TARGET, most=True)
            if first
            else "–",
            _cell(ours["faults_per_step"], FAULTS_TARGET, most=True, digits=0),
        )
    console.print(table)
    for result in results:
        for name, side in result["sides"].items():
            if side.get("error") or side.get("fallback"):
                what = f"failed: {side['error']}" if side.get("error") else side["fallback"]
                console.print(
                    f"{result['workload']['name']}, {name}: {what}", highlight=False, markup=False
                )


def _cell(value: float | None, target: float | None, *, most: bool = False, digits: int = 2) -> str:
    """Return a figure, green where it reaches the target and red where it does not."""
    if value is None:
        return "–"
    text = f"{value:.{digits}f}"
    if target is None:
        return text
    reached = value <= target if most else value >= target
    return f"[{'green' if reached else 'red'}]{text}[/] ({target:g})"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 if the engine failed on a workload."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__)
    keys = [entry.key for entry in SUITE]
    parser.add_argument("--only", default="", help=f"of these, by commas: {', '.join(keys)}")
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    add_settings(parser)
    options = parser.parse_args(arguments)
    wanted = [key for key in options.only.split(",") if key] or keys
    if unknown := set(wanted) - set(keys):
        parser.error(f"unknown workload {', '.join(sorted(unknown))}")
    if options.quick:
        options.rounds = min(options.rounds, 3)
    try:
        settings = settings_of(options)
    except ValueError as error:
        parser.error(str(error))
    console = make_console()
    machine = env.collect()
    machine["core"].pop("file", None)  # where this copy lies; results are published
    name = result_name(machine) + ("" if settings.dtype == "f32" else f"-{settings.dtype}")
    results: list[dict[str, Any]] = []
    for entry in SUITE:
        if entry.key not in wanted:
            continue
        with console.status("") as status:
            result = compare(entry.workload, settings, status.update)
        result |= {
            "key": entry.key,
            "targets": dict(entry.targets),
            "eta_target": ETA_TARGETS.get(entry.key),
            "ratios": {p: ratio(result, p, OURS) for p in settings.peers if p != OURS},
            "cpu_ratios": {p: ratio(result, p, OURS, "cpu") for p in settings.peers if p != OURS},
        }
        results.append(result)
        print_sides(result, console)
        document = {"environment": machine, "workloads": results}
        write_json(options.output / f"{name}.json", document)
        page = chart.page(document)
        (options.output / f"{name}.html").write_text(page, encoding="utf-8")
    print_summary(results, console)
    console.print(f"{options.output / name}.json and .html", highlight=False)
    return 1 if any("error" in r["sides"].get(OURS, {}) for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
