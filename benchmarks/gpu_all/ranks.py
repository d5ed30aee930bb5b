# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""One of several processes that train on one device; started by torch.distributed.run.

Gloo carries the gradients: NCCL refuses two processes on one device.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ortrain import ORTModule
from ortrain.optim import FusedAdamW
from ortrain.testing.models import CASES, VOCABULARY

ROWS, LENGTH = 8, 16


def main(arguments: list[str] | None = None) -> int:
    """Train, compare with PyTorch in one process on the whole batches; rank 0 writes the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_all.ranks")
    parser.add_argument("--device", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = CASES["gpt2"].build().to(options.device)
    model = DistributedDataParallel(ORTModule(copy.deepcopy(plain)))
    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(options.steps):
        # No padding, so that the mean over the processes is the mean over the batch.
        ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator).to(options.device)
        part = ids.chunk(size)[rank]
        loss = model(input_ids=part, labels=part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().cpu()
        dist.all_reduce(mean)
        expected = plain(input_ids=ids, labels=ids).loss
        expected.backward()
        reference.step()
        reference.zero_grad()
        worst = max(worst, abs(float(mean) / size - float(expected.detach())))
    flat = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    everywhere = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(everywhere, flat)
    differing = sum(not torch.equal(flat, other) for other in everywhere)
    if rank == 0:
        figures = {"loss difference": worst, "ranks differ": differing, "processes": size}
        options.result.write_text(json.dumps(figures), encoding="utf-8")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
