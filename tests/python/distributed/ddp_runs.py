# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What each process does in the tests of DistributedDataParallel and DeepSpeed around ORTModule."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ortrain import ORTModule

STEPS = 6
WIDTH = 24


class Branches(nn.Module):
    """A chain of layers, a tied weight, and a branch that a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, extra: bool = True) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.norm(self.frozen(x))
        if extra:
            x = x + self.extra(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def make(wraps: bool) -> tuple[nn.Module, nn.Module]:
    """Return a model, and what is to be called."""
    torch.manual_seed(4)
    model = Branches().eval()  # statistics of batches would differ from those of their halves
    return model, ORTModule(model) if wraps else model


def batches(count: int = STEPS, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (
            torch.randint(0, 40, (size,), generator=generator),
            torch.randint(0, 40, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def share(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return this process's part of a batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return [t.chunk(size)[rank] for t in tensors]


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def one_process() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on whole batches in PyTorch."""
    model, called = make(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for batch in batches():
        loss = called(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def data_parallel(
    wraps: bool, accumulation: int = 1, options: dict[str, Any] | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on parts of batches under DistributedDataParallel."""
    model, called = make(wraps)
    parallel = DistributedDataParallel(called, **(options or {}))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for i, batch in enumerate(batches()):
        last = (i + 1) % accumulation == 0
        with contextlib.nullcontext() if last else parallel.no_sync():
            loss = parallel(*share(batch))
            (loss / accumulation).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    if wraps:
        assert not any(r.fallback for r in called.report().captures)
    return losses, model.state_dict()


def unused_parameters(wraps: bool) -> dict[str, torch.Tensor]:
    """Leave a branch out in every second step, in one rank only in every third."""
    model, called = make(wraps)
    parallel = DistributedDataParallel(called, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i, batch in enumerate(batches()):
        extra = i % 2 == 0 and not (i % 3 == 0 and dist.get_rank() == 1)
        parallel(*share(batch), extra=extra).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def order_of_buckets(wraps: bool) -> list[str]:
    """Return what happens in one backward: starts of all-reduces, hand-overs of gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(8)))
    parallel = DistributedDataParallel(ORTModule(model) if wraps else model, bucket_cap_mb=1)
    events: list[str] = []

    def reduce(state, bucket):  # DDP looks at annotations, and they are strings here
        events.append("reduce")
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    parallel.register_comm_hook(None, reduce)
    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(lambda p: events.append("gradient"))
    for _ in range(3):  # buckets are laid out anew after the first
        events.clear()
        parallel(torch.randn(4, 600)).sum().backward()
    return events


def deepspeed_zero(stage: int, wraps: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Train under DeepSpeed.

    Returns:
      The losses, the weights, and the bytes of this process's optimizer states.
    """
    import deepspeed

    model, called = make(wraps)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 8 // dist.get_world_size(),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # 1.0 where it is left out
    }
    # Its collectives over shared memory would be compiled first, for most of a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    engine, optimizer, _, _ = deepspeed.initialize(model=called, optimizer=optimizer, config=config)
    losses = []
    for batch in batches():
        loss = engine(*share(batch))
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss))
    inner = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer
    held = sum(
        t.numel() * t.element_size()
        for state in inner.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor) and t.dim() > 0
    )
    return losses, model.state_dict(), held


def adamw_data_parallel() -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Train as ``deepspeed_zero`` does, with whole states in every process."""
    model, called = make(True)
    parallel = DistributedDataParallel(called)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    losses = []
    for batch in batches():
        loss = parallel(*share(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    held = sum(
        t.numel() * t.element_size()
        for state in optimizer.state.values()
        for t in state.values()
        if t.dim() > 0
    )
    return losses, model.state_dict(), held


def accelerated(mixed_precision: str = "no") -> list[float]:
    """Train with accelerate, which wraps the module and splits the data."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    model, called = make(True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids, labels = (torch.cat(t) for t in zip(*batches(), strict=True))
    loader = DataLoader(TensorDataset(ids, labels), batch_size=4)
    called, optimizer, loader = accelerator.prepare(called, optimizer, loader)
    losses = []
    for batch in loader:
        loss = called(*batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(called.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    assert isinstance(called, DistributedDataParallel)
    assert isinstance(accelerator.unwrap_model(called), ORTModule)
    folders = [tempfile.mkdtemp() if accelerator.is_main_process else ""]
    dist.broadcast_object_list(folders)
    accelerator.save_state(folders[0])
    accelerator.wait_for_everyone()
    accelerator.load_state(folders[0])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folders[0])
    return losses


def fully_sharded() -> list[str]:
    """Return what is raised for both forms of FSDP around an ORTModule, "" where it trains."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def original() -> None:
        model = ORTModule(nn.Linear(8, 8))
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))(torch.ones(2, 8))

    def second() -> None:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        model = ORTModule(nn.Linear(8, 8))
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 8))

    messages = []
    for form in (original, second):
        try:
            form()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("")
    return messages


def evaluates_before_training() -> tuple[bool, float]:
    """Train with ORTTrainer after an evaluation; tell what was trained, and the sum of weights."""
    from ortrain.hf import ORTTrainer, ORTTrainingArguments

    torch.manual_seed(1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.mse_loss(self.layer(x).squeeze(-1), labels)}

    generator = torch.Generator().manual_seed(3)
    rows = [
        {"x": torch.randn(4, generator=generator), "labels": torch.tensor(float(i))}
        for i in range(16)
    ]
    with tempfile.TemporaryDirectory() as folder:
        args = ORTTrainingArguments(
            folder,
            max_steps=3,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = ORTTrainer(model=Net(), args=args, train_dataset=rows, eval_dataset=rows)
        trainer.evaluate()
        trainer.train()
    weights = sum(float(p.detach().double().sum()) for p in trainer.model.parameters())
    return isinstance(trainer.model_wrapped, DistributedDataParallel), weights
