# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Time a training step of MiniLM in PyTorch eager and in Ortrain, one step of each in turn.

Both sides share the thread count, the optimizer class, the batches and the process. Reported are
the median, the quartiles and the best of the timed steps, wall clock and CPU time.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from ortrain import ORTModule, env

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from reuters_r8 import load_model


def make_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Return a function that trains the model on the batch for one step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        optimizer.step()

    return step


def make_batch(rows: int, length: int, density: float) -> dict[str, torch.Tensor]:
    """Return random token ids of which a share is real and the rest padding."""
    generator = torch.Generator().manual_seed(0)
    real = max(1, round(length * density))
    mask = (torch.arange(length) < real).long().expand(rows, length).contiguous()
    ids = torch.randint(1000, 20000, (rows, length), generator=generator) * mask
    labels = torch.randint(0, 8, (rows,), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def summary(seconds: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"median": median, "q1": low, "q3": high, "best": min(seconds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--density", type=float, default=1.0, help="share of tokens not padding")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON with the environment")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    batch = make_batch(arguments.batch, arguments.length, arguments.density)
    eager = load_model(dropout=not arguments.no_dropout).train()
    ours = ORTModule(copy.deepcopy(eager))
    steps = {"PyTorch": make_step(eager, batch), "Ortrain": make_step(ours, batch)}
    first = {}
    for name, step in steps.items():
        started = time.perf_counter()
        step()
        first[name] = time.perf_counter() - started
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.warmup + arguments.steps):
        for name in list(steps) if number % 2 == 0 else reversed(steps):
            wall_started, cpu_started = time.perf_counter(), time.process_time()
            steps[name]()
            if number >= arguments.warmup:
                wall[name].append(time.perf_counter() - wall_started)
                cpu[name].append(time.process_time() - cpu_started)

    result = {
        name: {"first": first[name], "wall": summary(wall[name]), "cpu": summary(cpu[name])}
        for name in steps
    }
    ratio = result["PyTorch"]["wall"]["median"] / result["Ortrain"]["wall"]["median"]
    if arguments.json:
        document = {"arguments": vars(arguments), "result": result, "ratio": ratio}
        print(json.dumps(document | {"environment": env.collect()}, indent=2))
        return 0
    print(
        f"MiniLM, batch {arguments.batch} x {arguments.length}, density {arguments.density}, "
        f"{torch.get_num_threads()} threads, {arguments.steps} steps of each side"
    )
    for name, values in result.items():
        line = {k: v * 1e3 for k, v in values["wall"].items()}
        print(
            f"{name:<8} median {line['median']:7.1f} ms  quartiles {line['q1']:.1f}-{line['q3']:.1f}"
            f"  best {line['best']:.1f}  CPU {values['cpu']['median'] * 1e3:.1f}"
            f"  first step {values['first']:.2f} s"
        )
    print(f"PyTorch / Ortrain, medians: {ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
