# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m conformance``: counts per outcome, and what is not native."""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from conformance import opinfo
from conformance.opinfo import Outcome

NATIVE_BAR = 0.6


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("names", nargs="*", help="operators whose names contain one of these")
    parser.add_argument("--samples", type=int, default=3, help="of each operator, at most")
    parser.add_argument("--json", type=Path, help="write all results there")
    options = parser.parse_args()
    console = Console()

    chosen = [
        op
        for op in opinfo.entries()
        if not options.names or any(n in op.name for n in options.names)
    ]
    results = [
        opinfo.run_entry(op, options.samples)
        for op in track(chosen, "operators", console=console, transient=True)
    ]
    if options.json:
        rows = [[r.name, r.outcome.name, r.samples, r.detail] for r in results]
        options.json.write_text(json.dumps(rows, indent=1))

    counts = collections.Counter(result.outcome for result in results)
    table = Table(title=f"{len(results)} operators, {sum(r.samples for r in results)} samples")
    table.add_column("outcome")
    table.add_column("operators", justify="right")
    for outcome in Outcome:
        table.add_row(outcome.value, str(counts[outcome]))
    console.print(table)
    for result in results:
        if result.outcome in (Outcome.wrong, Outcome.failed) or options.names:
            console.print(f"{result.name}: {result.outcome.value}: {result.detail}", markup=False)
    native = counts[Outcome.native] / max(len(results) - counts[Outcome.random], 1)
    console.print(f"native: {native:.2f} of those compared (bar {NATIVE_BAR})")
    bad = counts[Outcome.wrong] + counts[Outcome.failed]
    return 1 if bad or (native < NATIVE_BAR and not options.names) else 0


if __name__ == "__main__":
    raise SystemExit(main())
