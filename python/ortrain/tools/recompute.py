# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What ``max_memory`` does to the step of a model: memory, time and what is computed again.

``python -m ortrain.tools.recompute --model gpt2 --tokens 8x512 --max-memory 0.3x`` plans a step and
runs none; ``--measure 2`` runs that many with the budget and without, and compares their losses.
Models have random weights. ``tiny-<name>`` is a model of ``ortrain.testing.models``; other names are
those of the repository's ``benchmarks``, at their published sizes, which takes its folder as the
working directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ortrain import ORTModule, _core
from ortrain.errors import OutOfMemoryError
from ortrain.memory_budget import MemoryBudget
from ortrain.program import Program
from ortrain.report import MemoryPlan
from ortrain.testing.models import CASES

_TINY = "tiny-"
_TOKENS = re.compile(r"([1-9][0-9]*)[x×]([1-9][0-9]*)")
# The largest difference of losses that rounding makes.
_TOLERANCE = 1e-5

# Rows (first one: titles) under a heading.
_Table = tuple[str, list[tuple[str, ...]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model and its batches.

    Attributes:
      module: In train mode.
      batch: Returns the arguments of a step of (batch size, length).
      sample: A small size at which it is captured.
    """

    module: nn.Module
    batch: Callable[[int, int], dict[str, Any]]
    sample: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Steps that ran: forward and backward.

    Attributes:
      seconds: Of each step but the first, which captures and plans.
      losses: Of all steps, in order.
    """

    seconds: list[float]
    losses: list[float]


def make_model(name: str) -> Model:
    """Build a model by its name on the command line.

    Raises:
      ValueError: There is no such model.
    """
    if name.startswith(_TINY):
        case = CASES.get(name.removeprefix(_TINY))
        if case is None:
            known = ", ".join(_TINY + n for n in CASES)
            raise ValueError(f"--model is {name!r}, of small models there are {known}")
        return Model(case.build(), lambda b, s: case.batch(b, s, 0), case.sample)
    try:
        workloads = importlib.import_module("benchmarks.workloads")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--model is {name!r}: models of published sizes stand in the repository's folder "
            f"benchmarks, which is not in the working directory; names with {_TINY!r} in front "
            "need none"
        ) from error
    if name not in workloads.MODELS:
        known = ", ".join(workloads.MODELS)
        raise ValueError(f"--model is {name!r}; there are {known}, and small ones, {_TINY}gpt2 ...")
    kind = workloads.MODELS[name].kind
    sample = (2, 32) if kind in ("image", "vector") else (2, 16)
    return Model(
        workloads.Workload(name, *sample).build().train(),
        lambda b, s: workloads.Workload(name, b, s).make_batch(),
        sample,
    )


def plan_step(model: Model, size: tuple[int, int], budget: MemoryBudget) -> MemoryPlan:
    """Plan a training step of (batch size, length) within a budget, and run none of that size.

    Raises:
      OutOfMemoryError: The budget cannot be reached.
      ValueError: The model is not one graph for all sizes.
    """
    module = ORTModule(model.module)
    module(**model.batch(*model.sample))
    made = list(module._ortrain_engine.made_programs())
    if len(made) != 1:
        raise ValueError("the model runs in pieces, or in PyTorch; a plan needs one graph")
    ((entry, program),) = made
    batch = model.batch(*size)
    tensors = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    dims = []
    for described in program.graph.inputs:
        role = described["role"]
        if role in ("parameter", "buffer"):
            dims.append(list(tensors[described["target"]].shape))
        elif role == "user":
            dims.append(list(batch[described["name"]].shape))
        else:
            dims.append([])
    program = Program(entry.captured.graph, program.gradient_of, program.form, entry.device, budget)
    sizes = dict(program.session.plan(dims))
    sizes["steps"] = len(sizes["steps"])
    return MemoryPlan.of(sizes)


def measure(
    model: Model, size: tuple[int, int], steps: int, max_memory: int | str | None
) -> Measured:
    """Run steps with dropout, the same random numbers in each call of this function."""
    module = ORTModule(model.module, max_memory=max_memory)
    batch = model.batch(*size)
    result = Measured([], [])
    for step in range(steps + 1):
        torch.manual_seed(step)
        start = time.perf_counter()
        loss = _loss_of(module(**batch))
        loss.backward()
        if step > 0:
            result.seconds.append(time.perf_counter() - start)
        result.losses.append(loss.item())
        del loss
        module.zero_grad(set_to_none=True)
    _core.trim_memory()
    return result


def _loss_of(outputs: Any) -> torch.Tensor:
    if hasattr(outputs, "loss"):
        return outputs.loss
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def plan_tables(plan: MemoryPlan) -> list[_Table]:
    """Return what a plan within a budget takes, and what runs twice in it."""
    made = plan.recomputation
    if made is None:
        raise ValueError("the plan has no budget")
    saved = made.arena_bytes_without - plan.arena_bytes
    rows = [("", "without", "with", "share")]
    for title, without, within in (
        ("plan, all", made.total_bytes_without, plan.total_bytes),
        ("arena: activations, temporaries", made.arena_bytes_without, plan.arena_bytes),
        ("outputs", plan.forward_output_bytes, plan.forward_output_bytes),
        ("gradients", plan.gradient_bytes, plan.gradient_bytes),
    ):
        share = f"{within / without:.3f}" if without else ""
        rows.append((title, _mib(without), _mib(within), share))
    rows.append(("estimated time", "1", f"{made.time_share:.3f}", f"{made.time_share:.3f}"))
    heading = f"budget {_mib(made.budget_bytes)}, of all; {_mib(saved)} of the arena saved"
    operators = sorted(made.nodes.items(), key=lambda item: (-item[1], item[0]))
    nodes = [("computed again", "nodes"), *((op, str(count)) for op, count in operators)]
    return [(heading, rows), (f"{made.num_nodes} nodes, {_mib(made.bytes)} of results", nodes)]


def _measured_table(without: Measured, within: Measured) -> _Table:
    medians = [statistics.median(side.seconds) for side in (without, within)]
    differences = [abs(a - b) for a, b in zip(without.losses, within.losses, strict=True)]
    equal = "bit by bit" if not any(differences) else f"within {max(differences):.1e}"
    rows = [
        ("", "without", "with", "share"),
        ("time per step", *(f"{m:.2f} s" for m in medians), f"{medians[1] / medians[0]:.3f}"),
        ("loss of the last step", *(f"{s.losses[-1]:.6f}" for s in (without, within)), ""),
    ]
    return f"measured, medians of {len(without.seconds)}; losses equal {equal}", rows


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def _show(tables: Sequence[_Table]) -> None:
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        console = Console(markup=False)
        for heading, (titles, *rows) in tables:
            table = Table(title=heading, title_justify="left")
            for number, title in enumerate(titles):
                table.add_column(title, justify="right" if number else "left")
            for row in rows:
                table.add_row(*row)
            console.print(table)
        return
    for heading, rows in tables:
        print(heading)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for first, *others in rows:
            cells = [first.ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            print("  " + "  ".join(cells).rstrip())
        print()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 where a budget or a loss is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m ortrain.tools.recompute",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="gpt2", help="gpt2, bert-mlm, ..., tiny-gpt2, ...")
    parser.add_argument("--tokens", default="8x512", help="batch size and length, such as 8x512")
    parser.add_argument("--max-memory", default="0.3x", help='bytes, "2GiB" or a share: "0.3x"')
    parser.add_argument("--measure", type=int, default=0, metavar="STEPS", help="run that many")
    options = parser.parse_args(argv)
    size = _TOKENS.fullmatch(options.tokens)
    if size is None:
        parser.error(f"--tokens is {options.tokens!r}, expected a form such as 8x512")
    if options.measure < 0:
        parser.error(f"--measure is {options.measure}, expected 0 or more")
    given = options.max_memory
    max_memory = int(given) if given.isdecimal() else given
    shape = (int(size[1]), int(size[2]))
    try:
        budget = MemoryBudget.parse(max_memory, "--max-memory")
        assert budget is not None
        model = make_model(options.model)
        start = time.perf_counter()
        plan = plan_step(model, shape, budget)
    except OutOfMemoryError as error:
        print(error, file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    print(
        f"{options.model} {options.tokens}: captured and planned in "
        f"{time.perf_counter() - start:.1f} s"
    )
    tables = plan_tables(plan)
    status = 0
    if options.measure:
        within = measure(model, shape, options.measure, max_memory)
        without = measure(model, shape, options.measure, None)
        tables.append(_measured_table(without, within))
        pairs = zip(without.losses, within.losses, strict=True)
        status = int(any(abs(a - b) > _TOLERANCE * max(1.0, abs(a)) for a, b in pairs))
    _show(tables)
    return status


if __name__ == "__main__":
    sys.exit(main())
