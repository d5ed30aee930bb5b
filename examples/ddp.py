# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level GPT-2 in several processes, DistributedDataParallel around ORTModule.

    torchrun --nproc-per-node 2 examples/ddp.py --trace ddp.json

Prints how much of the communication the backward hides, and compares the losses with those of one
process that sees the whole batches. The trace opens in Perfetto or chrome://tracing.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import time

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel

from ortrain import ORTModule
from ortrain.optim import FusedAdamW


@dataclasses.dataclass
class Reduction:
    """One all-reduce of a bucket of gradients: when it began and ended, in seconds."""

    begin: float
    end: float
    bytes: int


@dataclasses.dataclass
class Step:
    """Times of one step, in seconds."""

    begin: float
    forward_end: float
    backward_end: float
    end: float
    reductions: list[Reduction]

    @property
    def total(self) -> float:
        """Seconds in which an all-reduce is under way."""
        covered, last = 0.0, 0.0
        for r in sorted(self.reductions, key=lambda r: r.begin):
            covered += max(0.0, r.end - max(r.begin, last))
            last = max(last, r.end)
        return covered

    @property
    def exposed(self) -> float:
        """Seconds of them after the last gradient was made, in which nothing else happens."""
        return max(r.end for r in self.reductions) - max(r.begin for r in self.reductions)


def make_model(layers: int, width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256,
        n_layer=layers,
        n_embd=width,
        n_head=width // 64,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config).train()


def make_batches(steps: int, batch: int, length: int) -> torch.Tensor:
    """Return bytes of the sources of Python's library, [steps, batch, length]."""
    sources = sorted(pathlib.Path(argparse.__file__).parent.glob("*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sources[:40])))
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - length, (steps, batch), generator=generator)
    return text[starts[..., None] + torch.arange(length)]


def train_in_parallel(
    model: torch.nn.Module, batches: torch.Tensor, bucket_mb: float
) -> tuple[list[float], list[Step]]:
    """Train on this process's part of each batch; return the mean losses and the times."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = DistributedDataParallel(ORTModule(model), bucket_cap_mb=bucket_mb)
    optimizer = FusedAdamW(model.parameters(), lr=3e-4)
    reductions: list[Reduction] = []

    def reduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        made = Reduction(time.perf_counter(), 0.0, bucket.buffer().nbytes)
        reductions.append(made)
        work = dist.all_reduce(bucket.buffer().div_(size), async_op=True)

        def finished(future: torch.futures.Future) -> torch.Tensor:
            made.end = time.perf_counter()
            return future.value()[0]

        return work.get_future().then(finished)

    parallel.register_comm_hook(None, reduce)
    losses, steps = [], []
    for whole in batches:
        ids = whole.chunk(size)[rank]
        reductions.clear()
        begin = time.perf_counter()
        loss = parallel(input_ids=ids, labels=ids).loss
        forward_end = time.perf_counter()
        loss.backward()
        backward_end = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        steps.append(Step(begin, forward_end, backward_end, end, list(reductions)))
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / size)
    return losses, steps


def train_alone(model: torch.nn.Module, batches: torch.Tensor) -> list[float]:
    """Train on whole batches in PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def write_trace(steps: list[Step], rank: int, path: pathlib.Path) -> None:
    """Write the steps as a Chrome trace: what is computed above, what is communicated below."""
    events = []

    def event(name: str, lane: str, begin: float, end: float) -> None:
        span = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
        events.append({"name": name, "ph": "X", "pid": rank, "tid": lane, **span})

    for step in steps:
        event("forward", "compute", step.begin, step.forward_end)
        event("backward", "compute", step.forward_end, step.backward_end)
        event("optimizer", "compute", step.backward_end, step.end)
        for i, r in enumerate(step.reductions):
            event(f"all-reduce {r.bytes >> 10} KiB", f"bucket {i}", r.begin, r.end)
    path.write_text(json.dumps({"traceEvents": events}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8, help="rows of all processes together")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--bucket-mb", type=float, default=8.0)
    parser.add_argument("--trace", type=pathlib.Path, help="where rank 0 writes a trace")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    batches = make_batches(arguments.steps, arguments.batch, arguments.length)
    model = make_model(arguments.layers, arguments.width)
    losses, steps = train_in_parallel(model, batches, arguments.bucket_mb)
    settled = steps[2:] or steps
    if rank == 0:
        expected = train_alone(make_model(arguments.layers, arguments.width), batches)
        apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        total = statistics.median(s.total for s in settled)
        exposed = statistics.median(s.exposed for s in settled)
        print(f"[rank 0] loss {losses[0]:.5f} -> {losses[-1]:.5f}, one process {expected[-1]:.5f}")
        print(f"[rank 0] losses apart by at most {apart:.1e}")
        print(
            f"[rank 0] a step {statistics.median(s.end - s.begin for s in settled) * 1e3:.0f} ms; "
            f"all-reduce {total * 1e3:.0f} ms, of which exposed {exposed * 1e3:.0f} ms "
            f"({100 * exposed / total:.0f} %)"
        )
        if arguments.trace is not None:
            write_trace(settled, rank, arguments.trace)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
