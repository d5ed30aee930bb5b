# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Programs of users on a device: each takes what wraps a module and where, and returns what it saw."""

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

Seen = dict[str, Any]


class Wrap:
    """One way to run modules.

    Args:
      make: Makes the module of this way; None for PyTorch alone.

    Attributes:
      ours: Whether it is the engine's.
      made: The modules that were made.
    """

    def __init__(self, make: Callable[[nn.Module], nn.Module] | None = None) -> None:
        self.ours = make is not None
        self.made: list[Any] = []
        self._make = make

    def __call__(self, module: nn.Module) -> Any:
        """Return a module as this way runs it."""
        if self._make is None:
            return module
        self.made.append(self._make(module))
        return self.made[-1]


PROGRAMS: dict[str, Callable[[Wrap, str], Seen]] = {}
_ALONE: set[str] = set()


def program(body: Callable[[Wrap, str], Seen]) -> Callable[[Wrap, str], Seen]:
    """Register a program."""
    PROGRAMS[body.__name__] = body
    return body


def large(body: Callable[[Wrap, str], Seen]) -> Callable[[Wrap, str], Seen]:
    """Register a program that wants the device's memory for itself."""
    _ALONE.add(body.__name__)
    return program(body)


def alone() -> set[str]:
    """Return the names of programs that want the device's memory for themselves."""
    return _ALONE


class Net(nn.Module):
    """A small network with an embedding, a norm, attention and a head."""

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 50)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(F.gelu(y.transpose(1, 2).flatten(2)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.block(self.embedding(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _ids(device: str, seed: int = 0, rows: int = 4, length: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (rows, length), generator=generator).to(device)


def _weights(model: nn.Module, prefix: str = "") -> Seen:
    return {prefix + name: p.detach().clone() for name, p in model.named_parameters()}


def _gradients(model: nn.Module) -> Seen:
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[f"gradient of {name}"] = p.grad.clone()
    return found


def _kind(device: str) -> str:
    return torch.device(device).type


@program
def scaled_float16(wrap: Wrap, device: str) -> Seen:
    """float16 autocast with GradScaler, clipping, a step whose gradients overflow."""
    plain = Net().to(device)
    model = wrap(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(_kind(device), init_scale=2.0**40, growth_interval=3)
    seen: Seen = {}
    for step in range(30):
        with torch.autocast(_kind(device), torch.float16):
            loss = model(_ids(device, step))
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
            loss = model(_ids(device, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seen |= _weights(plain, f"{name} ")
    return seen


@program
def accumulation(wrap: Wrap, device: str) -> Seen:
    """Gradients that add up over calls of several shapes, hooks on gradients, retained graphs."""
    plain = Net().to(device)
    model = wrap(plain)
    calls: list[float] = []
    plain.head.weight.register_hook(lambda g: calls.append(float(g.norm())) or g * 0.5)
    for step in range(6):
        loss = model(_ids(device, step, 2 + step % 3, 8 + 5 * (step % 2)))
        loss.backward(retain_graph=step == 2)
        if step == 2:
            loss.backward()
    return _gradients(plain) | {f"norm {i}": norm for i, norm in enumerate(calls)}


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
        model(_ids(device, step)).backward()
    return _gradients(plain)


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
    if _kind(device) == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        stream = torch.cuda.stream(side)
    with stream:
        for step in range(8):
            x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).to(device)
            model(x).backward()
    if _kind(device) == "cuda":
        torch.cuda.current_stream().wait_stream(side)
    return _gradients(plain)


@program
def two_streams(wrap: Wrap, device: str) -> Seen:
    """Two modules in two streams, by turns, with work between that is not waited for."""
    if _kind(device) != "cuda":
        return {}
    plains = [Net(64).to(device) for _ in range(2)]
    models = [wrap(plain) for plain in plains]
    streams = [torch.cuda.Stream() for _ in plains]
    torch.cuda.synchronize()
    for step in range(12):
        for model, stream in zip(models, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                model(_ids(device, step)).backward()
    torch.cuda.synchronize()
    return {f"{i} {k}": v for i, p in enumerate(plains) for k, v in _gradients(p).items()}


@program
def two_threads(wrap: Wrap, device: str) -> Seen:
    """A module is evaluated in one thread while another trains."""
    trained, evaluated = Net().to(device), Net(64).to(device).eval()
    model, other = wrap(trained), wrap(evaluated)
    losses: list[float] = []

    def evaluate() -> None:
        with torch.no_grad():
            losses.extend(float(other(_ids(device, step))) for step in range(20))

    thread = threading.Thread(target=evaluate)
    model(_ids(device)).backward()  # captured before the other thread starts
    thread.start()
    for step in range(20):
        model(_ids(device, step)).backward()
    thread.join()
    return _gradients(trained) | {f"loss {i}": loss for i, loss in enumerate(losses)}


def _pure(dtype: torch.dtype) -> Callable[[Wrap, str], Seen]:
    def run(wrap: Wrap, device: str) -> Seen:
        plain = Net(64).to(device, dtype)
        model = wrap(plain)
        loss = model(_ids(device))
        loss.backward()
        return _gradients(plain) | {"loss": loss.detach()}

    return run


PROGRAMS["pure_half"] = _pure(torch.float16)
PROGRAMS["pure_bfloat16"] = _pure(torch.bfloat16)
PROGRAMS["pure_double"] = _pure(torch.float64)


@program
def moved_about(wrap: Wrap, device: str) -> Seen:
    """From the device to the CPU and back, a state dictionary loaded between."""
    plain = Net().to(device)
    model = wrap(plain)
    model(_ids(device)).backward()
    saved = copy.deepcopy(model.state_dict())
    model.to("cpu")
    seen = {"loss on the CPU": float(model(_ids("cpu", 1)).detach())}
    with torch.no_grad():
        plain.head.weight.mul_(2)
    model.to(device)
    seen["loss"] = float(model(_ids(device, 1)).detach())
    model.load_state_dict(saved)
    loss = model(_ids(device, 2))
    loss.backward()
    return seen | _gradients(plain) | {"last": float(loss.detach())}


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
    return seen | _gradients(plain)


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
            with torch.autocast(_kind(device), torch.bfloat16, enabled=kind != torch.float32):
                y = model(x)
            y.float().square().mean().backward()
            seen[f"{name} {kind}"] = y.detach().to(kind)
    return seen | {name: g.to(torch.bfloat16) for name, g in _gradients(plain).items()}


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
    if _kind(device) == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    plain = Net(64).to(device)
    model = wrap(plain)
    runs = []
    for _ in range(2):
        model.zero_grad()
        for step in range(4):
            with torch.autocast(_kind(device), torch.bfloat16):
                loss = model(_ids(device, step, 16, 64))
            loss.backward()
        runs.append(torch.cat([p.grad.flatten() for p in plain.parameters()]))
    return {"same bits": bool(torch.equal(*runs)) or not wrap.ours}


@program
def memory_is_given_back(wrap: Wrap, device: str) -> Seen:
    """After a module is gone its memory is; after an error of memory the next step works."""
    if _kind(device) != "cuda":
        return {}

    def use() -> tuple[bool, float]:
        plain = Net(64).to(device)
        model = wrap(plain)
        wrap.made.clear()
        for step in range(4):
            model(_ids(device, step)).backward()
        raised = False
        torch.cuda.set_per_process_memory_fraction(0.02)  # others have theirs
        try:
            model(_ids(device, 0, 8192, 512))
        except RuntimeError as error:  # PyTorch's and ours are of this class
            raised = "memory" in str(error)
        torch.cuda.empty_cache()
        loss = model(_ids(device, 9))
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
    return _gradients(plain)


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
    backend = "nccl" if _kind(device) == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            plain = Net().to(device)
            model = nn.parallel.DistributedDataParallel(wrap(plain), gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
            for step in range(6):
                with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                    model(_ids(device, step)).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            return _weights(plain)
        finally:
            dist.destroy_process_group()


@program
def lora_with_checkpointing(wrap: Wrap, device: str) -> Seen:
    """A small Llama with LoRA of peft and gradient checkpointing, in bfloat16 autocast."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    plain = get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    ).to(device)
    for name, p in plain.named_parameters():  # the second factor is zero at first
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    plain.train()
    model = wrap(plain)
    for step in range(3):
        ids = _ids(device, step)
        with torch.autocast(_kind(device), torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    found = {name: g.to(torch.bfloat16) for name, g in _gradients(plain).items()}
    return found | {"loss": float(loss.detach())}


def _tiny_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def _rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index in range(48):
        length = 4 + index % 9
        ids = torch.randint(1, 50, (12,), generator=generator)
        mask = (torch.arange(12) < length).long()
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": index % 3})
    return rows


def _hugging_face(**options: Any) -> Callable[[Wrap, str], Seen]:
    def run(wrap: Wrap, device: str) -> Seen:
        from transformers import Trainer, TrainingArguments, set_seed

        from ortrain.hf import ORTTrainer, ORTTrainingArguments

        theirs, ours = (Trainer, TrainingArguments), (ORTTrainer, ORTTrainingArguments)
        trainer_class, arguments_class = ours if wrap.ours else theirs
        set_seed(3)
        model = _tiny_bert()
        with tempfile.TemporaryDirectory() as folder:

            def make(**more: Any) -> Any:
                arguments = arguments_class(
                    output_dir=folder,
                    per_device_train_batch_size=4,
                    learning_rate=1e-3,
                    logging_steps=1,
                    report_to=[],
                    disable_tqdm=True,
                    save_steps=6,
                    seed=7,
                    use_cpu=_kind(device) == "cpu",
                    **{"max_steps": 12, **options, **more},
                )
                return trainer_class(model=model, args=arguments, train_dataset=_rows())

            trainer = make()
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            model = _tiny_bert()
            again = make(max_steps=14)
            again.train(resume_from_checkpoint=True)
            losses += [entry["loss"] for entry in again.state.log_history if "loss" in entry]
            seen: Seen = {f"loss {i}": round(float(loss), 3) for i, loss in enumerate(losses)}
            seen["metrics"] = round(float(again.evaluate(_rows()[:16])["eval_loss"]), 3)
        return seen

    return run


PROGRAMS["hugging_face"] = _hugging_face()
PROGRAMS["hugging_face_bf16"] = _hugging_face(bf16=True, gradient_accumulation_steps=2)
PROGRAMS["hugging_face_fp16"] = _hugging_face(fp16=True, max_grad_norm=0.5)


@program
def accelerated(wrap: Wrap, device: str) -> Seen:
    """accelerate's loop with float16 and accumulation."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    mixed = "fp16" if _kind(device) == "cuda" else "bf16"
    accelerator = Accelerator(
        mixed_precision=mixed, gradient_accumulation_steps=2, cpu=_kind(device) == "cpu"
    )
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(wrap(plain), optimizer)
    seen: Seen = {}
    for step in range(10):
        with accelerator.accumulate(model):
            loss = model(_ids(str(accelerator.device), step))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seen[f"loss {step}"] = float(loss.detach())
    return seen


@program
def lightning(wrap: Wrap, device: str) -> Seen:
    """Lightning's Trainer with a network inside of the module wrapped."""
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl

    losses: list[float] = []

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = wrap(Net())

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.net(batch)
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    data = [_ids("cpu", step) for step in range(8)]
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="gpu" if _kind(device) == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Lit(), loader)
    return {f"loss {i}": round(loss, 2) for i, loss in enumerate(losses)}


@program
def trainer_of_2020(wrap: Wrap, device: str) -> Seen:
    """ORTTrainer with its loss and optimizer in one graph, against a loop."""
    from ortrain import ORTTrainer, ORTTrainerOptions, optim

    plain = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))
    ours = wrap.ours
    optimizer = torch.optim.AdamW(plain.to(device).parameters(), lr=1e-2, weight_decay=0.0)
    trainer: Any = None
    if ours:
        description = {
            "inputs": [("x", ["n", 12]), ("target", ["n"])],
            "outputs": [("loss", [], True), ("scores", ["n", 5])],
        }
        options = ORTTrainerOptions({"device": {"id": device}})
        trainer = ORTTrainer(
            plain, description, optim.AdamConfig(lr=1e-2), F.cross_entropy, options
        )
    seen: Seen = {}
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 12, generator=generator).to(device)
        target = torch.randint(0, 5, (16,), generator=generator).to(device)
        if ours:
            loss = trainer.train_step(x, target)[0]
        else:
            loss = F.cross_entropy(plain(x), target)
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)  # as AdamConfig does by default
            optimizer.step()
            optimizer.zero_grad()
        seen[f"loss {step}"] = float(loss.detach())
    return seen


@program
def generated(wrap: Wrap, device: str) -> Seen:
    """generate() of a causal model, greedily, between steps of its training."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=49,
    )  # fmt: skip
    plain = GPT2LMHeadModel(config).to(device)
    model = wrap(plain)
    ids = _ids(device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    seen: Seen = {}
    for step in range(3):
        model.train()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        made = model.generate(ids[:, :5], max_new_tokens=8, do_sample=False, pad_token_id=49)
        seen[f"tokens {step}"] = made
        seen[f"loss {step}"] = float(loss.detach())
    return seen


@program
def images_of_timm(wrap: Wrap, device: str) -> Seen:
    """Two networks of timm."""
    import timm

    seen: Seen = {}
    for name, size in (("resnet18", 64), ("vit_tiny_patch16_224", 224)):
        plain = timm.create_model(name, num_classes=5).to(device)
        model = wrap(plain)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 3, size, size, generator=generator).to(device)
            F.cross_entropy(model(x), torch.arange(4, device=device)).backward()
        seen |= {f"{name} {key}": value for key, value in _gradients(plain).items()}
    return seen


@program
def other_device_named(wrap: Wrap, device: str) -> Seen:
    """An argument on the wrong device raises; the next call works."""
    if _kind(device) != "cuda":
        return {}
    plain = Net().to(device)
    model = wrap(plain)
    model(_ids(device)).backward()
    raised = False
    try:
        model(_ids("cpu"))
    except RuntimeError:
        raised = True
    model(_ids(device, 3)).backward()
    return _gradients(plain) | {"raised": raised}


@program
def captured_by_a_graph_of_cuda(wrap: Wrap, device: str) -> Seen:
    """Training steps inside of torch.cuda.graph: recorded rightly, or an error and PyTorch goes on."""
    if _kind(device) != "cuda":
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
    return _gradients(plain)


def _wide(device: str) -> int:
    return (1 << 31) + 4099 if _kind(device) == "cuda" else 4099


@large
def elements_beyond_31_bits(wrap: Wrap, device: str) -> Seen:
    """Elementwise work, sums, softmax rows and a gather over more than 2^31 elements."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([0.5]))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = F.silu(x * self.scale.to(x.dtype)) + 1
            return y[at], y.narrow(0, y.shape[0] - 1000, 1000).float().sum()

    plain = Wide().to(device)
    model = wrap(plain)
    count = _wide(device)
    x = torch.ones(count, dtype=torch.bfloat16, device=device)
    x[-700:] = 2
    at = torch.tensor([0, count // 2, count - 701, count - 700, count - 1], device=device)
    taken, total = model(x, at)
    (taken.float().sum() + total).backward()
    return _gradients(plain) | {"taken": taken.detach(), "total": float(total.detach())}


@large
def logits_beyond_31_bits(wrap: Wrap, device: str) -> Seen:
    """A language model's head and loss whose logits have more than 2^31 elements."""
    rows = 44000 if _kind(device) == "cuda" else 40

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 50257, bias=False)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.norm(x)), labels)

    plain = Head().to(device)
    model = wrap(plain)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 64, generator=generator).to(device)
    labels = torch.randint(0, 50257, (rows,), generator=generator).to(device)
    with torch.autocast(_kind(device), torch.bfloat16):
        loss = model(x, labels)
    loss.backward()
    found = {name: g.to(torch.bfloat16) for name, g in _gradients(plain).items()}
    return found | {"loss": float(loss.detach())}


@large
def images_beyond_31_bits(wrap: Wrap, device: str) -> Seen:
    """Convolutions, a norm and a pool over more than 2^31 elements."""
    rows = 700 if _kind(device) == "cuda" else 2

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.avg_pool2d(self.norm(self.conv(x)).relu(), 4).square().mean()

    plain = Images().to(device)
    model = wrap(plain)
    side = 448 if _kind(device) == "cuda" else 16
    one = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)
    x = one * torch.linspace(0.5, 1.5, rows, device=device).view(-1, 1, 1, 1)
    with torch.autocast(_kind(device), torch.bfloat16):
        loss = model(x)
    loss.backward()
    found = {name: g.to(torch.bfloat16) for name, g in _gradients(plain).items()}
    return found | {"loss": float(loss.detach())}
