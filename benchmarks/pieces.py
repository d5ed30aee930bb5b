# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules that no graph holds whole, against PyTorch: ``python -m benchmarks.pieces``.

Steps of both run in turn, forward and backward. ``--costs`` measures what `ortrain.piece_costs` counts with: chains of
operators behind a cut, run by PyTorch, by Dynamo's code in PyTorch, and by the engine.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import fx, nn

from benchmarks.small_sizes import speech_sizes, text_sizes
from benchmarks.table import add_columns, make_console, seconds
from benchmarks.train_step import write_json
from ortrain import ORTModule, env
from ortrain.pieces import Pieces

Inputs = tuple[torch.Tensor, ...]


class GraphNetwork(nn.Module):
    """Two layers of graph convolution; the number of loops among the edges depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            source, target = edges[:, edges[0] != edges[1]]
            degree = torch.ones_like(x[:, 0]).scatter_add(0, target, torch.ones(len(target)))
            weight = degree.rsqrt()[source] * degree.rsqrt()[target]
            messages = layer(x).index_select(0, source) * weight[:, None]
            rows = target[:, None].expand_as(messages)
            x = messages.new_zeros(len(x), messages.shape[1]).scatter_add(0, rows, messages)
            x = torch.relu(x)
        return x


class Flow(nn.Module):
    """An ordinary differential equation, solved by Heun's method with steps as large as its error allows."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        t, step = 0.0, 0.05
        while t < 1.0:
            first = self.field(y)
            second = self.field(y + step * first)
            error = (step * (second - first)).abs().max().item()
            if error < 0.05:
                y, t = y + step * (first + second) / 2, t + step
            step = min(step * (1.5 if error < 0.02 else 0.7), max(1.0 - t, 1e-3))
        return y


def _longformer() -> tuple[nn.Module, Inputs]:
    from transformers import LongformerConfig, LongformerModel

    config = LongformerConfig(
        **text_sizes(500, width=64, heads=4), attention_window=32, max_position_embeddings=300
    )
    return LongformerModel(config), (torch.randint(0, 500, (2, 128)),)


def _wav2vec2() -> tuple[nn.Module, Inputs]:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        **speech_sizes(64, heads=4, channels=64, kernels=(10, 8, 8), strides=(5, 4, 4)),
        vocab_size=32,
        num_hidden_layers=3,
        num_feat_extract_layers=3,
    )
    return Wav2Vec2ForCTC(config), (torch.randn(2, 16000),)


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "graph network": lambda: (
        GraphNetwork(),
        (torch.randn(2000, 64), torch.randint(0, 2000, (2, 10000))),
    ),
    "flow": lambda: (Flow(), (torch.randn(64, 16),)),
    "longformer": _longformer,
    "wav2vec2": _wav2vec2,
}


def _loss(result: Any) -> torch.Tensor:
    return (result if isinstance(result, torch.Tensor) else result[0]).square().mean()


def compare(name: str, budget: float) -> dict[str, Any]:
    """Train a model in both for some seconds; returns lower quartiles of a step, the first call and what was cut."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = ORTModule(copy.deepcopy(model))
        _loss(ours(*inputs)).backward()
        first = time.perf_counter() - start
        for _ in range(3):
            _loss(ours(*inputs)).backward()
    times: dict[nn.Module, list[float]] = {model: [], ours: []}
    end = time.perf_counter() + budget
    while time.perf_counter() < end:
        for side, taken in times.items():
            begin = time.perf_counter()
            _loss(side(*inputs)).backward()
            taken.append(time.perf_counter() - begin)
    pytorch, ortrain = (sorted(taken)[len(taken) // 4] for taken in times.values())
    report = ours.report()
    return {
        "model": name,
        "pytorch": pytorch,
        "ortrain": ortrain,
        "first": first,
        "pieces": sum(capture.native_nodes > 0 for capture in report.pieces),
    }


class _Chain(nn.Module):
    def __init__(self, nodes: int, layers: int, width: int) -> None:
        super().__init__()
        self.nodes = nodes
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.nodes // 2):
            x = torch.sigmoid(x) * 1.5
        for layer in self.layers:
            x = layer(x)
        torch._dynamo.graph_break()
        return x


def costs(nodes: int, layers: int, shape: tuple[int, int]) -> dict[str, Any]:
    """Return the shortest forward without gradients, and forward and backward, of each way to run a chain."""
    x = torch.randn(shape, requires_grad=True)
    gradient = torch.ones(shape)
    figures: dict[str, Any] = {"nodes": nodes, "layers": layers, "elements": x.numel()}
    for way in ("pytorch", "dynamo", "engine"):
        torch._dynamo.reset()
        chain = _Chain(nodes, layers, shape[1])
        pieces = Pieces(chain)
        if way == "dynamo":

            def in_pytorch(piece: fx.GraphModule, _: Any) -> Callable[..., Any]:
                return piece.forward

            pieces._backend = in_pytorch

        def run(way: str = way, chain: nn.Module = chain, pieces: Pieces = pieces) -> Any:
            return chain(x) if way == "pytorch" else pieces.run((x,), {})

        def step(run: Callable[[], Any] = run) -> None:
            run().backward(gradient)

        figures[way] = _shortest(step)
        with torch.no_grad():
            figures[f"{way} without gradients"] = _shortest(run)
    return figures


def _shortest(run: Callable[[], Any], budget: float = 1.0, batch: int = 10) -> float:
    for _ in range(batch):
        run()
    shortest, end = float("inf"), time.perf_counter() + budget
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(batch):
            run()
        shortest = min(shortest, (time.perf_counter() - begin) / batch)
    return shortest


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pieces", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds per model")
    parser.add_argument("--costs", action="store_true", help="measure the constants instead")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console, rows = make_console(), []
    if options.costs:
        table = Table(title="Chains behind a cut, forward and backward | without gradients")
        add_columns(table, "operators", "layers", "elements", "PyTorch", "Dynamo", "engine")
        for nodes, layers, shape in (
            *((n, 0, (4, 8)) for n in (2, 10, 40)),
            *((n, 0, (256, 512)) for n in (2, 10, 20)),
            *((2, n, (4, 8)) for n in (4, 16)),
        ):
            figures = costs(nodes, layers, shape)
            rows.append(figures)
            ways = [
                f"{seconds(figures[w])} | {seconds(figures[f'{w} without gradients'])}"
                for w in ("pytorch", "dynamo", "engine")
            ]
            table.add_row(str(nodes), str(layers), str(figures["elements"]), *ways)
    else:
        table = Table(title="Modules that no graph holds whole, forward and backward")
        add_columns(table, "model", "PyTorch", "Ortrain", "speed-up", "first call", "pieces")
        for name in options.models.split(","):
            if name not in MODELS:
                parser.error(f"--models {name}: known are {', '.join(MODELS)}")
            with console.status(name):
                figures = compare(name, options.budget)
            rows.append(figures)
            table.add_row(
                name,
                seconds(figures["pytorch"]),
                seconds(figures["ortrain"]),
                f"{figures['pytorch'] / figures['ortrain']:.2f}×",
                seconds(figures["first"]),
                str(figures["pieces"]),
            )
    console.print(table)
    if options.json:
        write_json(options.json, {"environment": env.collect(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
