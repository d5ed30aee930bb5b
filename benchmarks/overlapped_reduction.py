# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""How much of ORTTrainer's gradient exchange the backward hides.

    torchrun --nproc-per-node 2 -m benchmarks.overlapped_reduction

A byte-level GPT-2 trains in several processes. Printed are the time in which gradients are under way, and the exposed
part of it: from the end of the backward to the end of the last all-reduce.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from examples.ddp import make_model
from ortrain import ORTTrainer, ORTTrainerOptions, optim
from ortrain.distributed import Processes
from ortrain.trainer.gradient_buckets import GradientBuckets


class Loss(torch.nn.Module):
    """A language model whose output is its loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.model = make_model(layers, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


class Watch:
    """Times of the latest step's collectives, in seconds."""

    def __init__(self) -> None:
        self.spans: list[list[float]] = []
        self.backward_end = 0.0
        begins, waits = Processes.begin_all_reduce, GradientBuckets.wait

        def begin(processes: Processes, tensor: torch.Tensor) -> Any:
            span = [time.perf_counter(), 0.0]
            self.spans.append(span)
            work = begins(processes, tensor)

            def ended(_: Any) -> None:
                span[1] = time.perf_counter()

            work.get_future().then(ended)
            return work

        def wait(buckets: GradientBuckets) -> None:
            self.backward_end = time.perf_counter()
            waits(buckets)

        Processes.begin_all_reduce = begin  # type: ignore[method-assign]
        GradientBuckets.wait = wait  # type: ignore[method-assign]

    def times(self) -> tuple[float, float]:
        """Return the seconds in which something is under way, and those of them behind the backward."""
        covered, last = 0.0, 0.0
        for begin, end in sorted(self.spans):
            covered += max(0.0, end - max(begin, last))
            last = max(last, end)
        return covered, max(0.0, last - self.backward_end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=4, help="of one process")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    watch = Watch()
    trainer = ORTTrainer(
        Loss(arguments.layers, arguments.width),
        {"inputs": [("ids", ["rows", "length"])], "outputs": [("loss", [], True)]},
        optim.AdamConfig(lr=3e-4),
        options=ORTTrainerOptions({"distributed": {"world_size": dist.get_world_size()}}),
    )
    generator = torch.Generator().manual_seed(rank)
    steps, covered, exposed = [], [], []
    for step in range(arguments.steps):
        ids = torch.randint(256, (arguments.rows, arguments.length), generator=generator)
        watch.spans.clear()
        begin = time.perf_counter()
        trainer.train_step(ids)
        if step >= 2:
            steps.append(time.perf_counter() - begin)
            times = watch.times()
            covered.append(times[0])
            exposed.append(times[1])
    if rank == 0:
        total, shown = statistics.median(covered), statistics.median(exposed)
        print(
            f"a step {statistics.median(steps) * 1e3:.0f} ms; all-reduce {total * 1e3:.0f} ms in "
            f"{len(watch.spans)} buckets, of which exposed {shown * 1e3:.0f} ms ({100 * shown / total:.0f} %)"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
