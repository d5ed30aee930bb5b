# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare training steps of small models on the engine with eager PyTorch.

``python -m ortrain.tools.parity --all`` or ``--model bert --model gpt2``; each model runs at the
sizes it was captured for and at others. ``--reference`` runs the graphs in PyTorch, node by node,
instead of the engine, which tells a wrong conversion from a wrong kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from ortrain.testing.models import CASES, ModelCase
from ortrain.testing.parity import (
    EngineRunner,
    ReferenceRunner,
    difference,
    eager_step,
)

TOLERANCE = 2e-5


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Largest differences of one step from eager PyTorch, relative where numbers exceed 1."""

    batch: int
    length: int
    outputs: float
    gradients: float
    buffers: float
    missing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the step is right."""
        return not self.missing and max(self.outputs, self.gradients, self.buffers) <= TOLERANCE


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What became of one model.

    Attributes:
      model: Its name.
      shapes: Differences at the captured size and at another.
      native_share: Share of nodes that the engine runs.
      nodes: Nodes of the graph.
      captures: How many graphs both sizes took.
      capture_seconds: Time of the first step, capture included.
      reason: Why the model does not run on the engine; empty where it does.
    """

    model: str
    shapes: tuple[Shape, ...]
    native_share: float
    nodes: int
    captures: int
    capture_seconds: float
    reason: str

    @property
    def ok(self) -> bool:
        """Whether the model runs natively and every step is right."""
        return not self.reason and self.native_share == 1.0 and all(s.ok for s in self.shapes)


def compare(case: ModelCase, *, reference: bool = False) -> Row:
    """Run one model at its two sizes and compare each step with eager PyTorch."""
    module = case.build()
    sizes = (case.sample, case.other)
    batches = [case.batch(*size, seed) for seed, size in enumerate(sizes)]
    expected = [eager_step(module, batch) for batch in batches]
    start = time.perf_counter()
    runner = (ReferenceRunner if reference else EngineRunner)(module, batches[0])
    steps = [runner.step(batches[0])]
    seconds = time.perf_counter() - start
    steps.append(runner.step(batches[1]))
    shapes = []
    for size, want, got in zip(sizes, expected, steps, strict=True):
        found = difference(want, got)
        shapes.append(Shape(*size, found.outputs, found.gradients, found.buffers, found.missing))
    share, nodes, captures, reason = runner.summary()
    return Row(case.name, tuple(shapes), share, nodes, captures, seconds, reason)


def _attempt(case: ModelCase, *, reference: bool) -> Row:
    """Compare one model; an error becomes the reason of its row."""
    if case.needs and importlib.util.find_spec(case.needs) is None:
        return Row(case.name, (), 0.0, 0, 0, 0.0, f"package {case.needs} is not installed")
    try:
        return compare(case, reference=reference)
    except Exception as error:
        # The table goes on with the next model; the reason stands in the row and sets the status.
        return Row(case.name, (), 0.0, 0, 0, 0.0, f"{type(error).__name__}: {error}")


def _as_json(row: Row) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "ok": row.ok}


def _print_table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for title in ("model", "size", "outputs", "gradients", "buffers"):
        table.add_column(title, justify="left" if title == "model" else "right")
    for title in ("native", "nodes", "graphs", "first step", ""):
        table.add_column(title, justify="right")
    for row in rows:
        tail = (
            f"{100 * row.native_share:.0f} %",
            str(row.nodes),
            str(row.captures),
            f"{row.capture_seconds:.1f} s",
            "[green]ok[/]"
            if row.ok
            else "[red]differs[/]"
            if not row.reason
            else "[red]not run[/]",
        )
        for i, shape in enumerate(row.shapes):
            numbers = (shape.outputs, shape.gradients, shape.buffers)
            table.add_row(
                "" if i else row.model,
                f"{shape.batch}x{shape.length}",
                *(f"{n:.1e}" for n in numbers),
                *(("",) * 5 if i else tail),
            )
        if not row.shapes:
            table.add_row(row.model, "", "", "", "", *tail)
    console = Console(markup=False, width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for row in rows:
        notes = [row.reason] if row.reason else []
        notes += [f"gradients in one only: {', '.join(s.missing)}" for s in row.shapes if s.missing]
        for note in notes:
            console.print(f"{row.model}: {note}", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 where a model differs or does not run natively."""
    parser = argparse.ArgumentParser(prog="python -m ortrain.tools.parity", description=__doc__)
    parser.add_argument("--model", action="append", choices=sorted(CASES), default=[])
    parser.add_argument("--all", action="store_true", help="every model of the list")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--reference", action="store_true", help="run the graphs in PyTorch")
    options = parser.parse_args(argv)
    names = list(CASES) if options.all else options.model
    if not names:
        parser.error("give --all or --model")
    rows = [_attempt(CASES[name], reference=options.reference) for name in names]
    if options.json:
        sys.stdout.write(json.dumps([_as_json(row) for row in rows], indent=2) + "\n")
    else:
        _print_table(rows)
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
