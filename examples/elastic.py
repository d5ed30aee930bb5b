# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Training in several processes that goes on when one of them dies.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py --checkpoints digits

ORTTrainer learns handwritten digits, the optimizer's states shared out (ZeRO stage 1), and saves a
checkpoint every few steps. When a process dies, torchrun starts all of them again, and they go on from
the last checkpoint, to the same weights bit by bit: what was drawn for dropout is drawn again. After
SIGTERM to any of them all save and end. `--lose-process-at 7` kills one to show it.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from ortrain import ORTTrainer, ORTTrainerOptions, distributed, optim
from ortrain.errors import FileError

MODEL_DESCRIPTION = {
    "inputs": [("image", ["batch", 64]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("scores", ["batch", 10])],
}


def make_trainer(lr: float) -> ORTTrainer:
    """Return a trainer for this process; torchrun says which of how many it is."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
    options = {
        "distributed": {
            "world_rank": distributed.world_rank(),
            "world_size": distributed.world_size(),
            "deepspeed_zero_optimization": {"stage": 1},
        }
    }
    return ORTTrainer(
        model,
        MODEL_DESCRIPTION,
        optim.AdamConfig(lr=lr),
        nn.CrossEntropyLoss(),
        ORTTrainerOptions(options),
    )


def rows_of_step(step: int, rank: int, size: int, batch_size: int, count: int) -> torch.Tensor:
    """Return which images a process gets in a step, the same whenever it is asked for."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(step))
    return order[: batch_size * size][rank::size]


def main() -> None:
    """Train from the last checkpoint on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32, help="of one process")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that stay")
    parser.add_argument("--lose-process-at", type=int, help="step in which the last process dies")
    arguments = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    trainer = make_trainer(arguments.lr)
    rank, size = distributed.world_rank(), distributed.world_size()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    done = trainer.train_step_info
    try:
        trainer.load_checkpoint(arguments.checkpoints)
    except FileError as error:
        if any(arguments.checkpoints.glob("checkpoint-*")):
            raise
        if rank == 0:
            print(f"starts anew: {error}", flush=True)
    if rank == 0:
        print(f"attempt {attempt} goes on from step {done.step}", flush=True)

    loss = torch.tensor(float("nan"))
    processes = distributed.Processes() if size > 1 else None
    with distributed.StopRequest(processes) as stop:
        saved = done.step
        while done.step < arguments.steps and not stop.asked():
            if done.step + 1 == arguments.lose_process_at and attempt == 0 and rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            rows = rows_of_step(done.step, rank, size, arguments.batch_size, len(images))
            loss, _ = trainer.train_step(images[rows], labels[rows])
            if done.step % arguments.every == 0:
                trainer.save_checkpoint(arguments.checkpoints, keep=arguments.keep)
                saved = done.step
        if saved != done.step:
            trainer.save_checkpoint(arguments.checkpoints, keep=arguments.keep)
    if rank == 0:
        print(f"step {done.step}: loss {loss.item():.4f}, saved", flush=True)


if __name__ == "__main__":
    main()
