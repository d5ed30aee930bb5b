# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m conformance.soak``: memory of a process that runs for long.

Many steps of one module, many modules made and dropped, many shapes. Resident memory is read after
a collection and after malloc has given back what is free.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from ortrain import ORTModule
from ortrain.optim import FusedAdamW

_PAGE = 4096


@dataclasses.dataclass(frozen=True)
class Growth:
    """Memory of one task.

    Attributes:
      name: What was repeated.
      times: How often, after the warm-up.
      mebibytes: By how much resident memory grew after the warm-up.
      most: What is allowed.
      seconds: How long it took.
    """

    name: str
    times: int
    mebibytes: float
    most: float
    seconds: float


def resident_mebibytes() -> float:
    """Return the resident memory of this process, what is free given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 2**20


def measure(
    name: str, task: Callable[[int], None], warm_up: int, times: int, most: float
) -> Growth:
    """Run a task ``warm_up`` times, then ``times`` times, and return by how much memory grew."""
    for i in range(warm_up):
        task(i)
    before, start = resident_mebibytes(), time.perf_counter()
    for i in track(range(times), name, transient=True):
        task(warm_up + i)
    seconds = time.perf_counter() - start
    return Growth(name, times, resident_mebibytes() - before, most, seconds)


class Model(nn.Module):
    """A small model of the usual parts: embedding, attention, normalization, dropout, loss."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True)
        self.head = nn.Linear(width, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layer(self.embed(ids)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Branching(nn.Module):
    """A module that no graph holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h.relu() if h.sum() > 0 else h).square().mean()


class Trainer:
    """A model and its optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self.model = ORTModule(module)
        self.optimizer = FusedAdamW(self.model.parameters(), lr=1e-4)

    def step(self, batch: torch.Tensor) -> None:
        """Run forward, backward and the optimizer."""
        self.model(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def steps_of(module: nn.Module, batch: torch.Tensor) -> Callable[[int], None]:
    """Return a task that is one step of one model."""
    trainer = Trainer(module)
    return lambda _: trainer.step(batch)


def shapes_of(module: nn.Module) -> Callable[[int], None]:
    """Return a task that is one step of one model at ever another shape."""
    trainer = Trainer(module)
    return lambda i: trainer.step(torch.randint(100, (1 + i % 7, 8 + i % 191)))


def new_model(_: int) -> None:
    """Make a model, take two steps with it, and drop it."""
    trainer = Trainer(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1), nn.Flatten(0)))
    model = trainer.model
    for _ in range(2):
        model(torch.randn(4, 16)).sum().backward()
        trainer.optimizer.step()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.soak", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the repetitions")
    share = parser.parse_args().share
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    ids = torch.randint(100, (4, 16))

    def times(count: int) -> int:
        return max(1, round(count * share))

    results = [
        measure("steps", steps_of(Model(), ids), 500, times(10_000), 4.0),
        measure("steps in pieces", steps_of(Branching(), torch.randn(4, 16)), 500, times(5_000), 4),
        # 512 plans of a graph and 256 primitives of oneDNN are kept: these shapes fill them.
        measure("shapes", shapes_of(Model()), 2_000, times(1_000), 8.0),
        measure("modules made and dropped", new_model, 30, times(500), 8.0),
    ]
    table = Table(title="Growth of resident memory")
    for column in ("repeated", "times", "MiB", "at most", "seconds"):
        table.add_column(column, justify="left" if column == "repeated" else "right")
    for r in results:
        cells = (r.name, str(r.times), f"{r.mebibytes:.1f}", f"{r.most:.0f}", f"{r.seconds:.0f}")
        table.add_row(*cells)
    Console().print(table)
    return int(any(r.mebibytes > r.most for r in results))


if __name__ == "__main__":
    raise SystemExit(main())
