# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m conformance``: every suite, one table of what is reached, status 1 below a bar.

With names, only what contains one of them, each with its detail; no bar counts then.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from conformance import accelerate_tests, architectures, guards, onnx_nodes, opinfo, random_programs
from conformance.onnx_nodes import NodeOutcome
from conformance.opinfo import Outcome
from conformance.silent import ways as silent_ways
from conformance.silent.program import programs as silent_programs

OPERATORS_BAR = 0.6
ARCHITECTURES_BAR = 57
PROGRAMS = 300
SILENT_TOGETHER = 6  # programs of a process where time is limited

_Case = TypeVar("_Case")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table: what was counted, the figure, the bar, whether it is reached."""

    what: str
    figure: str
    bar: str
    ok: bool


@dataclasses.dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
      names: What contains one of these; all, where there is none.
      samples: Of each operator, at most.
      programs: Random ones.
      console: Where to.
      device: Where tensors are.
      part: Which of how many parts of the cases.
      seconds: The last case of a suite begins before that.
    """

    names: Sequence[str]
    samples: int
    programs: int
    console: Console
    device: str = "cpu"
    part: tuple[int, int] = (0, 1)
    seconds: float = math.inf

    def mine(self, cases: Sequence[_Case]) -> Iterator[_Case]:
        """Yield the cases of this part while there is time."""
        end = time.monotonic() + self.seconds
        for case in cases[self.part[0] :: self.part[1]]:
            if time.monotonic() < end:
                yield case

    def progress(self, cases: Sequence[_Case], what: str) -> Iterable[_Case]:
        """Yield the same, and show how many are done."""
        total = len(cases[self.part[0] :: self.part[1]])
        return track(self.mine(cases), what, total=total, console=self.console, transient=True)


Suite = tuple[list[Line], list[Any]]


def _operators(request: Request) -> Suite:
    chosen = [
        op
        for op in opinfo.entries(request.device)
        if not request.names or any(n in op.name for n in request.names)
    ]
    results = [
        opinfo.run_entry(op, request.samples, request.device)
        for op in request.progress(chosen, "operators")
    ]
    counts = collections.Counter(result.outcome for result in results)
    for result in results:
        if result.outcome in (Outcome.wrong, Outcome.failed) or request.names:
            text = f"{result.name}: {result.outcome.value}: {result.detail}"
            request.console.print(text, markup=False)
    compared = len(results) - counts[Outcome.random]
    native = counts[Outcome.native] / max(compared, 1)
    bad = counts[Outcome.wrong] + counts[Outcome.failed]
    lines = [
        Line("OpInfo: operators compared", f"{compared}", "", True),
        Line("OpInfo: wrong values or errors", f"{bad}", "0", bad == 0),
        Line(
            "OpInfo: native",
            f"{counts[Outcome.native]} ({native:.2f})",
            f"{OPERATORS_BAR:.2f}",
            native >= OPERATORS_BAR,
        ),
        Line("OpInfo: as nodes in PyTorch", f"{counts[Outcome.escaped]}", "", True),
        Line("OpInfo: in PyTorch, no graph", f"{counts[Outcome.refused]}", "", True),
    ]
    return lines, [[r.name, r.outcome.name, r.samples, r.detail] for r in results]


def _onnx(request: Request) -> Suite:
    chosen = [
        case
        for case in onnx_nodes.cases()
        if not request.names or any(n in case.name for n in request.names)
    ]
    results = [onnx_nodes.run_case(case) for case in request.progress(chosen, "ONNX cases")]
    counts = collections.Counter(result.outcome for result in results)
    for result in results:
        if result.outcome is NodeOutcome.wrong or request.names:
            text = f"{result.name}: {result.outcome.value}: {result.detail}"
            request.console.print(text, markup=False)
    passed, wrong = counts[NodeOutcome.passed], counts[NodeOutcome.wrong]
    bar = onnx_nodes.CASES_BAR
    lines = [
        Line("ONNX node cases: right", f"{passed}", f"{bar}", passed >= bar),
        Line("ONNX node cases: wrong", f"{wrong}", "0", wrong == 0),
        Line("ONNX node cases: refused", f"{counts[NodeOutcome.refused]}", "", True),
    ]
    return lines, [[r.name, r.outcome.name, r.detail] for r in results]


def _architectures(request: Request) -> Suite:
    chosen = architectures.chosen(request.names)
    results = [
        result
        for architecture in request.progress(chosen, "architectures")
        for result in architectures.run([architecture], request.device)
    ]
    table = Table(title="Architectures of transformers")
    for column in ("model", "native", "escapes", "seconds", "differs, or no graph"):
        table.add_column(column)
    for r in results:
        why = r.difference or r.fallback
        cells = (r.name, f"{r.native_share:.3f}", f"{len(r.escapes)}", f"{r.seconds:.1f}", why[:90])
        table.add_row(*cells)
    request.console.print(table)
    bar = architectures.NATIVE_BAR
    right = [r for r in results if r.ok]
    native = [r for r in right if r.native_share >= bar]
    wrong = [r for r in results if r.difference]
    lines = [
        Line(
            "Architectures: right, one graph",
            f"{len(right)} of {len(results)}",
            f"{ARCHITECTURES_BAR}",
            len(right) >= ARCHITECTURES_BAR,
        ),
        Line(
            f"Architectures: {bar} of nodes native",
            f"{len(native)}",
            f"{ARCHITECTURES_BAR}",
            len(native) >= ARCHITECTURES_BAR,
        ),
        Line("Architectures: wrong", f"{len(wrong)}", "0", not wrong),
    ]
    return lines, [dataclasses.asdict(r) for r in results]


def _programs(request: Request) -> Suite:
    whole, told = 0, ""
    with request.console.status("random programs"):
        try:
            whole = random_programs.check(request.programs, request.part[0], request.device)
        except AssertionError as error:
            told = str(error)
            request.console.print(told, markup=False)
    figure = f"{request.programs}, {whole} as one graph"
    line = Line("Random programs equal to eager", figure, "all", not told)
    return [line], [*([index, ""] for index in range(request.programs - 1)), ["last", told]]


def _silent(request: Request) -> Suite:
    chosen = silent_programs(request.names)
    mine = request.mine(chosen)
    with request.console.status("programs on which capture may be silently wrong"):
        together = len(chosen) if request.seconds == math.inf else SILENT_TOGETHER
        outcomes = []
        while some := list(itertools.islice(mine, together)):
            outcomes += silent_ways.run(some, ["ortrain"], device=request.device)
    for text in silent_ways.describe(outcomes, every=bool(request.names)):
        request.console.print(text, markup=False, highlight=False)
    counts = collections.Counter(o.judged["ortrain"].verdict for o in outcomes)
    wrong, errors = counts[silent_ways.Verdict.wrong], counts[silent_ways.Verdict.error]
    of = f"of {len(outcomes)}"
    lines = [
        Line("Changing state, aliases, draws: silently wrong", f"{wrong} {of}", "0", wrong == 0),
        Line("Changing state, aliases, draws: errors", f"{errors} {of}", "", True),
    ]
    found = [(o.program.name, o.judged["ortrain"]) for o in outcomes]
    return lines, [[name, judged.verdict.name, judged.detail] for name, judged in found]


def _guards(request: Request) -> Suite:
    with request.console.status("guards"):
        microseconds = guards.check_microseconds()
    bar = guards.BAR_MICROSECONDS
    figure = f"{microseconds:.0f} µs"
    # Time decides nothing: another machine has another figure.
    return [Line("Guards of a step of BERT-base", figure, f"{bar} µs (not counted)", True)], []


def _accelerate(request: Request) -> Suite:
    what = "accelerate's tests with Ortrain imported"
    try:
        with request.console.status("accelerate's tests"):
            without, beside = accelerate_tests.run()
    except accelerate_tests.NotFetchedError as error:
        return [Line(what, f"not run: {error}"[:60], "", True)], []
    bar = f"{accelerate_tests.counts(without)} (without)"
    same = bool(without) and without == beside
    return [Line(what, accelerate_tests.counts(beside), bar, same)], [dict(beside)]


SUITES: dict[str, Callable[[Request], Suite]] = {
    "operators": _operators,
    "onnx": _onnx,
    "architectures": _architectures,
    "programs": _programs,
    "silent": _silent,
    "guards": _guards,
    "accelerate": _accelerate,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("names", nargs="*", help="what contains one of these")
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="default: all")
    parser.add_argument("--samples", type=int, default=3, help="of each operator, at most")
    parser.add_argument("--programs", type=int, default=PROGRAMS, help="random ones")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--device", default="cpu", help="where tensors are")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th case from the i-th on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins later")
    options = parser.parse_args()
    console = Console()
    index, _, count = options.part.partition("/")
    request = Request(
        options.names,
        options.samples,
        options.programs,
        console,
        options.device,
        (int(index), int(count)),
        options.seconds,
    )
    if options.device != "cpu":
        torch.backends.cudnn.allow_tf32 = False  # in which two right results differ

    lines: list[Line] = []
    details: dict[str, Any] = {}
    for name in options.suite or SUITES:
        start = time.perf_counter()
        found, details[name] = SUITES[name](request)
        lines += found
        console.print(f"{name}: {time.perf_counter() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(details, indent=1))
    table = Table(title="Conformance")
    for column in ("what", "figure", "bar", ""):
        table.add_column(column)
    for line in lines:
        table.add_row(line.what, line.figure, line.bar, "" if line.ok else "[red]below[/]")
    console.print(table)
    whole = not options.names and request.part[1] == 1 and options.seconds == math.inf
    return int(whole and not all(line.ok for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())
