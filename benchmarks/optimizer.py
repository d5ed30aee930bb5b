# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Time an optimizer step alone: PyTorch's default and fused kernels, and Ortrain's.

Two lists of parameters: those of GPT-2 124M, where memory bandwidth is the limit, and many tiny
ones, where the cost per parameter is. Steps of all sides are taken in turn in one process. GB/s
counts what a step has to move: 28 bytes per element for AdamW, 4 more for the norm when clipping.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ortrain.optim import FusedAdamW, FusedLAMB, FusedSGD

MAX_NORM = 1.0


def gpt2_shapes(layers: int = 12, width: int = 768) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of GPT-2, 124 million elements by default."""
    block: list[tuple[int, ...]] = [(width,)] * 2
    for rows, columns in ((width, 3 * width), (width, width)):
        block += [(rows, columns), (columns,)]
    block += [(width,)] * 2
    for rows, columns in ((width, 4 * width), (4 * width, width)):
        block += [(rows, columns), (columns,)]
    return [(50257, width), (1024, width), *block * layers, (width,), (width,)]


def make_parameters(shapes: list[tuple[int, ...]], seed: int = 0) -> list[torch.nn.Parameter]:
    """Return parameters with gradients."""
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02)
        parameter.grad = torch.randn(shape, generator=generator) * 1e-3
        parameters.append(parameter)
    return parameters


def clipped(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> Callable:
    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()

    return step


def sides(shapes: list[tuple[int, ...]], clip: bool, only_adamw: bool) -> dict[str, Callable]:
    """Return the step of each side by name, each on parameters of its own."""
    result: dict[str, Callable] = {}
    for name, fused in (("AdamW", None), ("AdamW fused=True", True)):
        parameters = make_parameters(shapes)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=fused)
        result[name] = clipped(optimizer, parameters) if clip else optimizer.step
    norm = MAX_NORM if clip else None
    result["FusedAdamW"] = FusedAdamW(make_parameters(shapes), lr=1e-4, max_grad_norm=norm).step
    if not only_adamw:
        parameters = make_parameters(shapes)
        result["FusedLAMB"] = FusedLAMB(parameters, lr=1e-4, max_grad_norm=norm).step
        parameters = make_parameters(shapes)
        result["FusedSGD"] = FusedSGD(parameters, lr=1e-4, momentum=0.9, max_grad_norm=norm).step
    return result


def measure(steps: dict[str, Callable], rounds: int) -> dict[str, dict[str, float]]:
    """Return the least and the median seconds of each side, steps taken in turn."""
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(2):
        for step in steps.values():
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            step()
            wall[name].append(time.perf_counter() - begin)
            cpu[name].append(time.process_time() - cpu_begin)
    return {
        name: {
            "min": min(wall[name]),
            "median": statistics.median(wall[name]),
            "cpu_median": statistics.median(cpu[name]),
        }
        for name in steps
    }


def report(title: str, elements: int, clip: bool, results: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}{', clipped' if clip else ''}")
    print(f"{'':18}{'min ms':>10}{'median ms':>11}{'CPU ms':>10}{'GB/s':>8}{'x fused':>9}")
    fused = results["AdamW fused=True"]["min"]
    for name, row in results.items():
        rate = (28 + 4 * clip) * elements / row["min"] / 1e9
        shown = f"{rate:8.1f}" if "AdamW" in name else f"{'':8}"
        print(
            f"{name:18}{row['min'] * 1e3:10.3f}{row['median'] * 1e3:11.3f}"
            f"{row['cpu_median'] * 1e3:10.3f}{shown}{fused / row['min']:9.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12, help="of the GPT-2 parameter list")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", type=int, default=200, help="number of tiny parameters")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only-adamw", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"PyTorch {torch.__version__}, {options.threads} threads, float32")
    lists = {
        "GPT-2 parameters": (gpt2_shapes(options.layers), options.rounds),
        f"{options.tiny} parameters of 3": ([(3,)] * options.tiny, 50 * options.rounds),
    }
    everything = {}
    for title, (shapes, rounds) in lists.items():
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        for clip in (False, True):
            results = measure(sides(shapes, clip, options.only_adamw), rounds)
            report(f"{title}, {elements / 1e6:.4g} M elements", elements, clip, results)
            everything[f"{title}{' clipped' if clip else ''}"] = results
    if options.json:
        options.json.write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
