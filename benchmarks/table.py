# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Results as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare import ratio


def seconds(value: float) -> str:
    """Return a duration with a fitting unit."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def mib(value: float) -> str:
    """Return bytes in MiB."""
    return f"{value / 2**20:.0f} MiB"


def add_columns(table: Table, *titles: str) -> None:
    """Add columns: the first to the left, the others to the right."""
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)


def make_console() -> Console:
    """Return a console that does not squeeze tables into 80 columns when its output is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def print_sides(result: dict[str, Any], console: Console) -> None:
    """Print the figures of every side of one comparison."""
    best = max(result["gemm"], key=result["gemm"].get)
    settings = result["settings"]
    table = Table(
        title=f"{result['workload']['name']}, {settings['dtype']}: {result['flops'] / 1e9:.4g} "
        f"GFLOP at {result['gemm'][best] / 1e9:.1f} GFLOP/s ({best}); load {result['load']:.1f}"
    )
    reference = next(iter(result["sides"]), None)
    columns = ("wall median", "min", "CPU median", "min", "η", "first step", "peak", "faults/step")
    add_columns(table, "side", *columns, "speed-up", "optimizer")
    notes = []
    for name, side in result["sides"].items():
        if "error" in side:
            notes.append(f"{name} failed: {side['error']}")
            continue
        if side.get("fallback"):
            notes.append(f"{name} ran in PyTorch: {side['fallback']}")
        speed = ratio(result, reference, name)
        table.add_row(
            name,
            seconds(side["wall"]["median"]),
            seconds(side["wall"]["min"]),
            seconds(side["cpu"]["median"]),
            seconds(side["cpu"]["min"]),
            f"{side['eta']:.2f}",
            seconds(side["first_step"]["wall"]),
            mib(side["peak_bytes"]),
            f"{side['faults_per_step']:.0f}",
            "" if speed is None else f"{speed:.2f}×",
            side["optimizer"],
        )
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, markup=False)
