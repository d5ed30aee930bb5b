# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m conformance.silent``: programs on which graph capture may be silently wrong.

Each runs in PyTorch alone, with torch.compile and with Ortrain; what it shows must be equal. Status
1 where Ortrain is silently wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from conformance.silent.program import programs
from conformance.silent.ways import PROGRAM_SECONDS, Judged, Outcome, Verdict, describe, run
from conformance.silent.worker import WAYS

WIDTH = 165
_DEFAULT = "eager,compile,ortrain"
_STYLES = {Verdict.wrong: "red", Verdict.error: "yellow"}


def print_table(console: Console, outcomes: Sequence[Outcome], ways: Sequence[str]) -> None:
    """Print a row per program: where it is from, what became of it in each way, how Ortrain ran."""
    table = Table(title="Programs on which capture may be silently wrong")
    for column in ("topic", "program", "issue", "year", *ways, "Ortrain ran it"):
        table.add_column(column, overflow="fold")
    for outcome in outcomes:
        program, judged = outcome.program, outcome.judged
        cells = [_cell(judged[way]) for way in ways]
        how = judged["ortrain"].how if "ortrain" in judged else ""
        year = str(program.year or "")
        table.add_row(program.topic, program.name, program.origin, year, *cells, how)
    console.print(table)


def _cell(judged: Judged) -> str:
    style = _STYLES.get(judged.verdict)
    return f"[{style}]{judged.verdict.value}[/]" if style else judged.verdict.value


def count_line(outcomes: Sequence[Outcome], ways: Sequence[str]) -> str:
    """Return how many programs each way has silently wrong."""
    version = torch.__version__.partition("+")[0]
    names = {
        "ortrain": "Ortrain",
        "compile": f"torch.compile {version}",
        "again": f"PyTorch {version} again",
    }
    parts = []
    for way in sorted(ways, key=list(names).index):
        wrong = sum(o.judged[way].verdict is Verdict.wrong for o in outcomes)
        parts.append(f"{names[way]}: {wrong} of {len(outcomes)} silently wrong")
    return "; ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.silent", description=__doc__)
    parser.add_argument("--ways", default=_DEFAULT, help=f"{','.join(WAYS)}; default: {_DEFAULT}")
    parser.add_argument("--only", action="append", default=[], help="a topic, or part of a name")
    parser.add_argument("--limit", type=float, default=PROGRAM_SECONDS, help="seconds a program")
    parser.add_argument("--list", action="store_true", help="print what there is, run nothing")
    parser.add_argument("--json", type=Path, help="write all results there")
    options = parser.parse_args()
    asked = options.ways.split(",")
    if unknown := set(asked) - set(WAYS):
        parser.error(f"--ways knows {', '.join(WAYS)}, not {', '.join(sorted(unknown))}")
    ways = [way for way in WAYS if way in asked and way != "eager"]
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    chosen = programs(options.only)
    if options.list:
        for p in chosen:
            console.print(f"{p.topic}: {p.name} ({p.origin}): {p.what}", markup=False)
        return 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("programs", total=len(chosen) * (1 + len(ways)))
        outcomes = run(
            chosen,
            ways,
            lambda way, name: progress.update(task, advance=1, description=f"{way} {name}"),
            options.limit,
        )
    print_table(console, outcomes, ways)
    for text in describe(outcomes, every=bool(options.only)):
        console.print(text, markup=False, highlight=False)
    if options.json:
        options.json.write_text(json.dumps([_plain(o) for o in outcomes], indent=1))
    console.print(count_line(outcomes, ways), highlight=False)
    wrong = [o for o in outcomes if "ortrain" in ways if _wrong(o)]
    return int(bool(wrong))


def _wrong(outcome: Outcome) -> bool:
    return outcome.judged["ortrain"].verdict is Verdict.wrong


def _plain(outcome: Outcome) -> dict[str, object]:
    judged = {
        way: {**dataclasses.asdict(found), "verdict": found.verdict.value}
        for way, found in outcome.judged.items()
    }
    program = outcome.program
    return {"name": program.name, "origin": program.origin, **judged}


if __name__ == "__main__":
    raise SystemExit(main())
