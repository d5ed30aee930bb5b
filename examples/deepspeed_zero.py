# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed ZeRO 1 and 2 around ORTModule in two processes, beside DistributedDataParallel.

    python examples/deepspeed_zero.py

Prints the losses of all three, which must agree, and the memory of the optimizer's states in a
process.
"""

import argparse
import dataclasses
import logging
import os
import pathlib
import socket
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import transformers
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from ortrain import ORTModule

LEARNING_RATE = 1e-3
TOLERANCE = 1e-4


@dataclasses.dataclass
class Outcome:
    """Losses by step, and the bytes of the optimizer's states in one process."""

    losses: list[float]
    state_bytes: int


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256,
        n_layer=4,
        n_embd=256,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config).train()


def make_batches(steps: int, batch: int) -> torch.Tensor:
    """Return bytes of Python's own sources, [steps, batch, 64]."""
    text = torch.tensor(list(pathlib.Path(argparse.__file__).read_bytes()))
    starts = torch.randint(
        len(text) - 64, (steps, batch), generator=torch.Generator().manual_seed(1)
    )
    return text[starts[..., None] + torch.arange(64)]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return sum(t.nbytes for t in states if t.dim() > 0)


def data_parallel(batches: torch.Tensor) -> Outcome:
    model = make_model()
    parallel = DistributedDataParallel(ORTModule(model))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    losses = []
    for ids in batches:
        loss = parallel(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return Outcome(losses, state_bytes(optimizer))


def zero(stage: int, batches: torch.Tensor) -> Outcome:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": batches.shape[1],
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # DeepSpeed clips at 1.0 where this is left out
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=ORTModule(model),
        optimizer=torch.optim.AdamW(model.parameters(), LEARNING_RATE),
        config=config,
    )
    losses = []
    for ids in batches:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
    return Outcome(losses, state_bytes(optimizer.optimizer))


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def work(rank: int, size: int, port: int, steps: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = make_batches(steps, 4 * size).chunk(size, dim=1)[rank]
    outcomes = {"DistributedDataParallel": data_parallel(batches)}
    for stage in (1, 2):
        outcomes[f"DeepSpeed ZeRO {stage}"] = zero(stage, batches)
    if rank == 0:
        rows = {name: dataclasses.asdict(o) for name, o in outcomes.items()}
        torch.save(rows, pathlib.Path(folder) / "outcomes.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            work,
            (arguments.processes, port, arguments.steps, folder),
            nprocs=arguments.processes,
        )
        rows = torch.load(pathlib.Path(folder) / "outcomes.pt", weights_only=True)
    reference = rows["DistributedDataParallel"]
    table = Table("", "first loss", "last loss", "apart", "optimizer state, MiB", "share")
    right = True
    for name, row in rows.items():
        pairs = zip(row["losses"], reference["losses"], strict=True)
        apart = max(abs(a - b) for a, b in pairs)
        right &= apart < TOLERANCE
        table.add_row(
            name,
            f"{row['losses'][0]:.5f}",
            f"{row['losses'][-1]:.5f}",
            f"{apart:.1e}",
            f"{row['state_bytes'] / 2**20:.1f}",
            f"{row['state_bytes'] / reference['state_bytes']:.2f}",
        )
    Console(width=100).print(table)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
