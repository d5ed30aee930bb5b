# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a step costs besides its arithmetic: ``python -m benchmarks.overhead``.

Small MLPs of growing depth are trained. The overhead of a step is its wall time less the time of
the engine's nodes; a line ``a + b * parameter tensors`` is fitted to it. Beside it stands what
PyTorch's autograd takes to hand a ready gradient to each parameter, which no engine under it avoids.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from benchmarks.peers import PEERS, make_step
from benchmarks.table import add_columns, make_console, seconds
from benchmarks.train_step import write_json
from benchmarks.workloads import Workload
from ortrain import env
from ortrain.profile import profile

FIXED_TARGET, PER_PARAMETER_TARGET = 50e-6, 0.2e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """Medians of one depth, in seconds.

    Attributes:
      layers: Linear layers of the MLP.
      parameters: Parameter tensors.
      step: A whole step with clipping, AdamW and zero_grad.
      model: Forward and backward alone.
      nodes: The engine's nodes in one forward and backward.
      autograd: Forward and backward of an autograd.Function of as many parameters that computes
        nothing.
      eager: A whole step in stock PyTorch.
    """

    layers: int
    parameters: int
    step: float
    model: float
    nodes: float
    autograd: float
    eager: float


class _Nothing(torch.autograd.Function):
    """Takes parameters, computes nothing, returns the gradients it was given."""

    @staticmethod
    def forward(
        ctx: Any, ready: list[torch.Tensor], x: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.ready = ready
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        made = tuple(ctx.ready)
        ctx.ready.clear()  # what nobody else holds becomes `.grad` without a copy
        return (None, None, *made)


def measure(layers: int, repeat: int) -> Point:
    """Train an MLP of some depth and return the medians."""
    workload = Workload("mlp", 8, 1, overrides={"layers": layers})
    batch = workload.make_batch()
    eager = make_step(PEERS["eager"].make(workload.build()), batch, "f32")
    side = PEERS["ortrain"].make(workload.build())
    ours = make_step(side, batch, "f32")

    def model_only() -> None:
        side.model(**batch).loss.backward()

    def without_gradients() -> None:
        side.optimizer.zero_grad(set_to_none=True)

    parameters = [nn.Parameter(torch.zeros_like(p)) for p in side.model.parameters()]
    ready: list[torch.Tensor] = []

    def nothing() -> None:
        _Nothing.apply(ready, batch["x"], *parameters).backward()

    def prepare_gradients() -> None:
        for p in parameters:
            p.grad = None
        ready[:] = [torch.empty_like(p) for p in parameters]

    step = _median(ours, repeat)
    model = _median(model_only, repeat, without_gradients)
    with profile(side.model) as measured:
        _median(model_only, repeat, without_gradients)
    runs = max(node.runs for node in measured.nodes)
    return Point(
        layers=layers,
        parameters=len(parameters),
        step=step,
        model=model,
        nodes=measured.seconds / runs,
        autograd=_median(nothing, repeat, prepare_gradients),
        eager=_median(eager, repeat),
    )


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return a and b of the least-squares line a + b * x."""
    line = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return line.intercept, line.slope


def _median(
    run: Callable[[], Any], repeat: int, between: Callable[[], Any] = lambda: None
) -> float:
    times = []
    for number in range(repeat + repeat // 4):
        between()
        start = time.perf_counter()
        run()
        if number >= repeat // 4:
            times.append(time.perf_counter() - start)
    between()
    return statistics.median(times)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--layers", default="2,8,32,64", help="depths, separated by commas")
    parser.add_argument("--repeat", type=int, default=300, help="steps per depth")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    depths = sorted({int(text) for text in options.layers.split(",")})
    if len(depths) < 2 or depths[0] < 1:
        parser.error("--layers needs two positive depths or more")
    if options.repeat < 4 or options.threads < 1:
        parser.error("--repeat is at least 4, --threads at least 1")
    torch.set_num_threads(options.threads)
    console = make_console()
    points = []
    for depth in depths:
        with console.status(f"{depth} layers"):
            points.append(measure(depth, options.repeat))
    table = Table(title="MLPs of width 32, batch 8")
    titles = (
        "parameter tensors",
        "step",
        "forward + backward",
        "nodes",
        "overhead",
        "of the model",
        "autograd alone",
    )
    add_columns(table, "layers", *titles, "eager step", "speed-up")
    for p in points:
        table.add_row(
            str(p.layers),
            str(p.parameters),
            *(seconds(x) for x in (p.step, p.model, p.nodes, p.step - p.nodes, p.model - p.nodes)),
            seconds(p.autograd),
            seconds(p.eager),
            f"{p.eager / p.step:.2f}×",
        )
    console.print(table)
    fits = {
        "step": fit([(p.parameters, p.step - p.nodes) for p in points]),
        "model": fit([(p.parameters, p.model - p.nodes) for p in points]),
        "autograd": fit([(p.parameters, p.autograd) for p in points]),
        "eager": fit([(p.parameters, p.eager) for p in points]),
    }
    for name, what in (
        ("step", "whole step"),
        ("model", "forward and backward"),
        ("autograd", "forward and backward in PyTorch's autograd alone"),
    ):
        fixed, slope = fits[name]
        console.print(
            f"overhead of the {what}: {fixed * 1e6:.1f} µs + {slope * 1e6:.2f} µs per parameter",
            highlight=False,
        )
    console.print(
        f"aim: {FIXED_TARGET * 1e6:.0f} µs + {PER_PARAMETER_TARGET * 1e6:.1f} µs per parameter",
        highlight=False,
    )
    if options.json:
        document = {"environment": env.collect(), "points": [dataclasses.asdict(p) for p in points]}
        write_json(options.json, document | {"fits": fits})
    return 0


if __name__ == "__main__":
    sys.exit(main())
