# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""``ortrain-ops``: check operators and list what is supported.

Examples:
  ortrain-ops check                    every kernel against "ref", every refusal
  ortrain-ops grad --op Softmax        gradient rules against finite differences in float64
  ortrain-ops support                  operators, types, gradients, kernels

``--device cuda:0`` takes the kernels of a GPU, ``--device simulator`` the same ones in a build that
runs them on the CPU; the reference is the CPU's "ref" in either case.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ortrain import _core

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

OpOption = Annotated[str, typer.Option("--op", help="Only this operator, e.g. ortrain::Linear.")]
KernelOption = Annotated[str, typer.Option("--kernel", help="Only this kernel.")]
DeviceOption = Annotated[
    str, typer.Option("--device", help="Whose kernels: cpu, cuda:0 or simulator.")
]


def full_name(op: dict[str, Any]) -> str:
    """Return ``ortrain::Linear`` for an operator of ours, ``Softmax`` for a standard one."""
    return f"{op['domain']}::{op['name']}" if op["domain"] else op["name"]


def _kernels_of(device: str) -> dict[str, list[str]]:
    """Return the kernels of each operator on a device."""
    try:
        return _core.device_kernels(device)
    except _core.DeviceError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error


def _selected(op: str, wanted: Callable[[dict[str, Any]], bool]) -> list[int]:
    known = {full_name(o) for o in _core.ops()}
    if op and op not in known:
        raise typer.BadParameter(f"there is no operator {op!r}", param_hint="--op")
    return [
        index
        for index, case in enumerate(_core.op_cases())
        if (not op or case["op"] == op) and wanted(case)
    ]


def _run(indices: list[int], rows_of: Callable[[int], list[dict[str, Any]]], kernel: str) -> int:
    console = Console(markup=False)
    start = time.perf_counter()
    passed = failed = refused = 0
    worst = 0.0
    ops = set()
    cases = _core.op_cases()
    for index in indices:
        ops.add(cases[index]["op"])
        for row in rows_of(index):
            if kernel and row["kernel"] not in (kernel, ""):
                continue
            if row["refused"]:
                refused += 1
            elif row["passed"]:
                passed += 1
                worst = max(worst, row["difference"])
            else:
                failed += 1
                console.print(
                    f"[red]failed[/] {row['name']} {row['kernel']} {row['type']}: {row['message']}",
                    highlight=False,
                )
    seconds = time.perf_counter() - start
    console.print(
        f"{len(ops)} operators, {len(indices)} cases: {passed} passed, {failed} failed, "
        f"{refused} outside of a kernel's range; largest difference {worst:.2e}; {seconds:.1f} s",
        highlight=False,
    )
    return 1 if failed else 0


@app.command()
def check(op: OpOption = "", kernel: KernelOption = "", device: DeviceOption = "cpu") -> None:
    """Run every kernel against "ref" for every element type, and every refusal."""
    _kernels_of(device)
    indices = _selected(op, lambda case: True)
    raise typer.Exit(_run(indices, lambda i: _core.check_case(i, device), kernel))


@app.command()
def grad(op: OpOption = "", device: DeviceOption = "cpu") -> None:
    """Compare gradient rules with central differences in float64."""
    _kernels_of(device)
    indices = _selected(op, lambda case: case["has_gradient_check"])
    raise typer.Exit(_run(indices, lambda i: [_core.check_case_gradient(i, device)], ""))


@app.command()
def support(op: OpOption = "", device: DeviceOption = "cpu") -> None:
    """List operators with types, gradient, kernels and number of cases."""
    kernels = _kernels_of(device)
    table = Table(title="Operators")
    for column in ("operator", "since", "types", "gradient", f"kernels, {device}", "cases"):
        table.add_column(column)
    ops = [o for o in _core.ops() if not op or full_name(o) == op]
    if not ops:
        raise typer.BadParameter(f"there is no operator {op!r}", param_hint="--op")
    for o in ops:
        table.add_row(
            full_name(o),
            str(o["since"]),
            "; ".join(f"{k}: {', '.join(v)}" for k, v in o["types"].items()),
            o["gradient"],
            ", ".join(kernels[full_name(o)]),
            str(o["cases"]),
        )
    console = Console(markup=False)
    console.print(table)
    rules = sum(o["gradient"] == "yes" for o in ops)
    missing = [full_name(o) for o in ops if o["gradient"] == "missing"]
    console.print(
        f"{len(ops)} operators, {rules} with a gradient, {len(missing)} without one: "
        f"{', '.join(missing) or 'none'}",
        highlight=False,
    )


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
