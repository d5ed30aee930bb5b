# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Trainings by hand on a device."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu_all.programs.registry import (
    PROGRAMS,
    Net,
    Seen,
    Wrap,
    gradients_of,
    ids_of,
    kind_of,
    program,
    weights_of,
)


@program
def scaled_float16(wrap: Wrap, device: str) -> Seen:
    """float16 autocast with GradScaler, clipping, a step whose gradients overflow."""
    plain = Net().to(device)
    model = wrap(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(kind_of(device), init_scale=2.0**40, growth_interval=3)
    seen: Seen = {}
    for step in range(30):
        with torch.autocast(kind_of(device), torch.float16):
            loss = model(ids_of(device, step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen[f"loss {step}"] = float(loss.detach())
    seen["scale"] = scaler.get_scale()
    return seen


@program
def fused_optimizers(wrap: Wrap, device: str) -> Seen:
    """The engine's optimizers against PyTorch's, state dictionaries exchanged between them."""
    from ortrain.optim import FusedAdamW, FusedSGD

    plain = Net().to(device)
    model = wrap(plain)
    ours = wrap.ours
    seen: Seen = {}
    for name, fused, theirs, options in (
        ("adamw", FusedAdamW, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3}),
        ("sgd", FusedSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    ):
        optimizer = (fused if ours else theirs)(plain.parameters(), **options)
        for step in range(8):
            if step == 4 and ours:  # go on in the other's class
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = theirs(plain.parameters(), **options)
                optimizer.load_state_dict(state)
            loss = model(ids_of(device, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seen |= weights_of(plain, f"{name} ")
    return seen


@program
def accumulation(wrap: Wrap, device: str) -> Seen:
    """Gradients that add up over calls of several shapes, hooks on gradients, retained graphs."""
    plain = Net().to(device)
    model = wrap(plain)
    calls: list[float] = []
    plain.head.weight.register_hook(lambda g: calls.append(float(g.norm())) or g * 0.5)
    for step in range(6):
        loss = model(ids_of(device, step, 2 + step % 3, 8 + 5 * (step % 2)))
        loss.backward(retain_graph=step == 2)
        if step == 2:
            loss.backward()
    return gradients_of(plain) | {f"norm {i}": norm for i, norm in enumerate(calls)}


@program
def checkpointed(wrap: Wrap, device: str) -> Seen:
    """torch.utils.checkpoint inside of a forward, both kinds, with dropout."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            x = checkpoint(self.block, x, use_reentrant=False)
            x = checkpoint(self.block, x, use_reentrant=True)
            return self.head(x).square().mean()

    plain = Checkpointed(dropout=0.0).to(device)
    model = wrap(plain)
    for step in range(3):
        model(ids_of(device, step)).backward()
    return gradients_of(plain)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * x * x  # a third of the derivative, so that one can tell


@program
def own_function(wrap: Wrap, device: str) -> Seen:
    """An autograd function of the user's between layers, on a stream of the user's."""

    class Cubed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(_Cube.apply(self.a(x)).relu()).square().mean()

    plain = Cubed().to(device)
    model = wrap(plain)
    stream: Any = contextlib.nullcontext()
    if kind_of(device) == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        stream = torch.cuda.stream(side)
    with stream:
        for step in range(8):
            x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).to(device)
            model(x).backward()
    if kind_of(device) == "cuda":
        torch.cuda.current_stream().wait_stream(side)
    return gradients_of(plain)


@program
def two_streams(wrap: Wrap, device: str) -> Seen:
    """Two modules in two streams, by turns, with work between that is not waited for."""
    if kind_of(device) != "cuda":
        return {}
    plains = [Net(64).to(device) for _ in range(2)]
    models = [wrap(plain) for plain in plains]
    streams = [torch.cuda.Stream() for _ in plains]
    torch.cuda.synchronize()
    for step in range(12):
        for model, stream in zip(models, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                model(ids_of(device, step)).backward()
    torch.cuda.synchronize()
    return {f"{i} {k}": v for i, p in enumerate(plains) for k, v in gradients_of(p).items()}


@program
def two_threads(wrap: Wrap, device: str) -> Seen:
    """A module is evaluated in one thread while another trains."""
    trained, evaluated = Net().to(device), Net(64).to(device).eval()
    model, other = wrap(trained), wrap(evaluated)
    losses: list[float] = []

    def evaluate() -> None:
        with torch.no_grad():
            losses.extend(float(other(ids_of(device, step))) for step in range(20))

    thread = threading.Thread(target=evaluate)
    model(ids_of(device)).backward()  # captured before the other thread starts
    thread.start()
    for step in range(20):
        model(ids_of(device, step)).backward()
    thread.join()
    return gradients_of(trained) | {f"loss {i}": loss for i, loss in enumerate(losses)}


def _pure(dtype: torch.dtype) -> Callable[[Wrap, str], Seen]:
    def run(wrap: Wrap, device: str) -> Seen:
        plain = Net(64).to(device, dtype)
        model = wrap(plain)
        loss = model(ids_of(device))
        loss.backward()
        return gradients_of(plain) | {"loss": loss.detach()}

    return run


PROGRAMS["pure_half"] = _pure(torch.float16)
PROGRAMS["pure_bfloat16"] = _pure(torch.bfloat16)
PROGRAMS["pure_double"] = _pure(torch.float64)


@program
def moved_about(wrap: Wrap, device: str) -> Seen:
    """From the device to the CPU and back, a state dictionary loaded between."""
    plain = Net().to(device)
    model = wrap(plain)
    model(ids_of(device)).backward()
    saved = copy.deepcopy(model.state_dict())
    model.to("cpu")
    seen = {"loss on the CPU": float(model(ids_of("cpu", 1)).detach())}
    with torch.no_grad():
        plain.head.weight.mul_(2)
    model.to(device)
    seen["loss"] = float(model(ids_of(device, 1)).detach())
    model.load_state_dict(saved)
    loss = model(ids_of(device, 2))
    loss.backward()
    return seen | gradients_of(plain) | {"last": float(loss.detach())}


@program
def evaluated(wrap: Wrap, device: str) -> Seen:
    """Evaluation under no_grad and inference_mode between steps; buffers of batch norm."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
            self.out = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(F.max_pool2d(self.norm(self.conv(x)).relu(), 2).mean((2, 3)))

    plain = Images().to(device)
    model = wrap(plain)
    seen: Seen = {}
    for step in range(4):
        x = torch.randn(4, 3, 20, 18, generator=torch.Generator().manual_seed(step)).to(device)
        if step % 2:
            x = x.contiguous(memory_format=torch.channels_last)
        model.train()
        model(x).square().mean().backward()
        model.eval()
        with torch.no_grad():
            seen[f"no grad {step}"] = model(x)
        with torch.inference_mode():
            seen[f"inference {step}"] = model(x).clone()
    seen |= {f"buffer {n}": b.clone() for n, b in plain.named_buffers()}
    return seen | gradients_of(plain)


@program
def odd_views(wrap: Wrap, device: str) -> Seen:
    """Arguments at odd addresses, transposed, expanded, with steps."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(33, 17)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).softmax(-1).cumsum(0)

    plain = Views().to(device)
    model = wrap(plain)
    base = torch.randn(70, 70, generator=torch.Generator().manual_seed(0)).to(device)
    seen: Seen = {}
    flat = base.flatten()
    for name, x in {
        "odd address": flat[1 : 1 + 40 * 33].view(40, 33),
        "transposed": base[:33, :40].t(),
        "steps": base[::2, 1:67:2],
        "expanded": base[:1, :33].expand(40, 33),
        "odd rows": base[3:, 5:38],
    }.items():
        for kind in (torch.float32, torch.bfloat16):
            with torch.autocast(kind_of(device), torch.bfloat16, enabled=kind != torch.float32):
                y = model(x)
            y.float().square().mean().backward()
            seen[f"{name} {kind}"] = y.detach().to(kind)
    return seen | gradients_of(plain, torch.bfloat16)


@program
def dropped(wrap: Wrap, device: str) -> Seen:
    """Dropout: the share that is dropped, the same mask backward, equal seeds, unequal steps."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1 << 20))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x * self.scale, 0.25, self.training)

    plain = Dropped().to(device)
    model = wrap(plain)
    x = torch.ones(1 << 20, device=device)
    seen: Seen = {}
    masks = []
    for step in range(8):
        torch.manual_seed(step // 2)
        plain.scale.grad = None
        y = model(x)
        y.sum().backward()
        masks.append(y.detach() > 0)
        seen[f"same mask {step}"] = bool(torch.equal(plain.scale.grad > 0, masks[-1]))
        seen[f"share {step}"] = round(float(masks[-1].float().mean()), 2)
        seen[f"value {step}"] = float(y.max().detach())
    seen["equal seeds"] = bool(torch.equal(masks[0], masks[1]))
    seen["other seeds"] = bool(torch.equal(masks[1], masks[2]))
    return seen


@program
def deterministic(wrap: Wrap, device: str) -> Seen:
    """Two runs of the same steps give the same bits."""
    if kind_of(device) == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    plain = Net(64).to(device)
    model = wrap(plain)
    runs = []
    for _ in range(2):
        model.zero_grad()
        for step in range(4):
            with torch.autocast(kind_of(device), torch.bfloat16):
                loss = model(ids_of(device, step, 16, 64))
            loss.backward()
        runs.append(torch.cat([p.grad.flatten() for p in plain.parameters()]))
    return {"same bits": bool(torch.equal(*runs)) or not wrap.ours}


@program
def memory_is_given_back(wrap: Wrap, device: str) -> Seen:
    """After a module is gone its memory is; after an error of memory the next step works."""
    if kind_of(device) != "cuda":
        return {}

    def use() -> tuple[bool, float]:
        plain = Net(64).to(device)
        model = wrap(plain)
        wrap.made.clear()
        for step in range(4):
            model(ids_of(device, step)).backward()
        raised = False
        torch.cuda.set_per_process_memory_fraction(0.02)  # others have theirs
        try:
            model(ids_of(device, 0, 8192, 512))
        except RuntimeError as error:  # PyTorch's and ours are of this class
            raised = "memory" in str(error)
        torch.cuda.empty_cache()
        loss = model(ids_of(device, 9))
        loss.backward()
        return raised, float(loss.detach())

    use()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    raised, loss = use()
    gc.collect()
    torch.cuda.synchronize()
    return {"raised": raised, "loss": loss, "kept": torch.cuda.memory_allocated() - before}


@program
def twice_differentiated(wrap: Wrap, device: str) -> Seen:
    """A gradient penalty: backward of a backward."""
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    model = wrap(plain)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    g.square().sum().backward()
    return gradients_of(plain)


@program
def rounded_products(wrap: Wrap, device: str) -> Seen:
    """float32 products that may be rounded to TF32, and then may not."""
    plain = nn.Linear(256, 256).to(device)
    model = wrap(plain)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(device)
    exact = x.double() @ plain.weight.double().t() + plain.bias.double()
    seen: Seen = {}
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        apart = float((model(x).double() - exact).detach().norm() / exact.detach().norm())
        seen[precision] = apart > 1e-5
    return seen


@program
def one_process_group(wrap: Wrap, device: str) -> Seen:
    """DistributedDataParallel by NCCL with one process, buckets as views, and fully_shard."""
    backend = "nccl" if kind_of(device) == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            plain = Net().to(device)
            model = nn.parallel.DistributedDataParallel(wrap(plain), gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
            for step in range(6):
                with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                    model(ids_of(device, step)).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            return weights_of(plain)
        finally:
            dist.destroy_process_group()


@program
def other_device_named(wrap: Wrap, device: str) -> Seen:
    """An argument on the wrong device raises; the next call works."""
    if kind_of(device) != "cuda":
        return {}
    plain = Net().to(device)
    model = wrap(plain)
    model(ids_of(device)).backward()
    raised = False
    try:
        model(ids_of("cpu"))
    except RuntimeError:
        raised = True
    model(ids_of(device, 3)).backward()
    return gradients_of(plain) | {"raised": raised}


@program
def captured_by_a_graph_of_cuda(wrap: Wrap, device: str) -> Seen:
    """Training steps inside of torch.cuda.graph: recorded rightly, or an error and PyTorch goes on."""
    if kind_of(device) != "cuda":
        return {}
    plain = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    model = wrap(plain)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    plain.zero_grad()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            model(x).square().mean().backward()
    except RuntimeError as error:
        return {"raised": str(error)[:200]} if not wrap.ours else {}
    for p in plain.parameters():
        p.grad.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return gradients_of(plain)
