# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""First contact with a device: what is found, single layers, short trainings, faults, a profile."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_all.line import Aim, Line, Run
from benchmarks.gpu_all.op_cases import environment_of_program, find_program
from benchmarks.worker import Worker

_TRACE_LINES = 40


def caught(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a check; an error becomes what is wrong, with the end of its trace."""
    try:
        return work()
    except Exception:
        # The other checks of the line are worth as much.
        lines = traceback.format_exc().splitlines()
        return {"right": False, "error": "\n".join(lines[-_TRACE_LINES:])}


# --- in a worker


def _layers(rehearsal: bool) -> dict[str, tuple[Callable[[], Any], tuple[int, ...]]]:
    """Return layers by name, with the shape of an input; small ones for a rehearsal."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Call(nn.Module):
        # One number for all would have a gradient whose rounding errors may cancel on one side.
        def __init__(self, function: Callable[[Any], Any], columns: int) -> None:
            super().__init__()
            self.function = function
            self.scale = nn.Parameter(torch.ones(columns))

        def forward(self, x: Any) -> Any:
            return self.function(x * self.scale)

    def heads(x: Any) -> Any:
        return x.view(2, -1, 4, 64).transpose(1, 2)

    def attend(causal: bool, x: Any) -> Any:
        return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=causal)

    def first(layer: Callable[[], Any]) -> Callable[[], Any]:
        class First(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer()

            def forward(self, x: Any) -> Any:
                return self.layer(x)[0]

        return First

    calls: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
        "add": (lambda x: x + x.flip(0), (37, 53)),
        "gelu": (F.gelu, (37, 129)),
        "silu": (F.silu, (64, 256)),
        "tanh": (torch.tanh, (5, 7, 11)),
        "softmax": (lambda x: x.softmax(-1), (33, 1000)),
        "softmax of long rows": (lambda x: x.softmax(-1), (3, 50257)),
        "log_softmax": (lambda x: x.log_softmax(1), (16, 77, 3)),
        "sum": (lambda x: x.sum((0, 2)), (8, 31, 65)),
        "mean of all": (lambda x: x.mean(), (1000, 1001)),
        "amax": (lambda x: x.amax(-1), (33, 513)),
        "transpose": (lambda x: x.transpose(1, 2).contiguous(), (4, 33, 65)),
        "cat": (lambda x: torch.cat([x, 2 * x[:, :5]], 1), (7, 19)),
        "slice": (lambda x: x[:, 3:-2:2] * 2, (9, 40)),
        "matmul": (lambda x: x @ x.transpose(-1, -2), (6, 65, 33)),
        "attention": (functools.partial(attend, False), (2, 100, 256)),
        "causal attention": (functools.partial(attend, True), (2, 129, 256)),
        "causal attention of 512": (functools.partial(attend, True), (2, 512, 256)),
        "cumsum": (lambda x: x.cumsum(1), (5, 300)),
        "where": (lambda x: torch.where(x > 0, x, 0.1 * x), (77, 13)),
        "gelu by hand": (
            lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3)))),
            (64, 3072),
        ),
        "gather": (lambda x: x[torch.arange(20, device=x.device) % 7], (8, 33)),
    }

    def classify(x: Any) -> Any:
        logits = x @ x.transpose(0, 1)  # 16 bits under autocast
        return F.cross_entropy(logits, torch.arange(len(logits), device=x.device) % 5)

    # What CUDA's autocast runs in float32, by operators that it does not know.
    calls |= {
        "cross entropy": (classify, (9, 33)),
        "square": (lambda x: torch.square(x @ x.transpose(0, 1)), (17, 33)),
        "nearest": (lambda x: F.interpolate(x @ x.transpose(-1, -2), scale_factor=2), (2, 3, 8, 8)),
    }
    vocabulary = 257 if rehearsal else 50257
    layers: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
        name: (functools.partial(Call, function, shape[-1]), shape)
        for name, (function, shape) in calls.items()
    }
    return layers | {
        "linear": (lambda: nn.Linear(65, 129), (33, 65)),
        "linear of a vocabulary": (lambda: nn.Linear(64, vocabulary), (48, 64)),
        # Large enough for products of rows that are padded.
        "linear of odd rows": (lambda: nn.Linear(768, vocabulary, bias=False), (1024, 768)),
        "layer norm of 768": (lambda: nn.LayerNorm(768), (4096, 768)),
        "layer norm": (lambda: nn.LayerNorm(769), (64, 769)),
        "rms norm": (lambda: nn.RMSNorm(512), (64, 512)),
        "group norm": (lambda: nn.GroupNorm(4, 12), (3, 12, 17, 9)),
        "batch norm": (lambda: nn.BatchNorm2d(12), (5, 12, 17, 9)),
        "conv2d": (lambda: nn.Conv2d(8, 16, 3, padding=1), (4, 8, 33, 31)),
        "conv1d": (lambda: nn.Conv1d(6, 10, 5, stride=2), (3, 6, 101)),
        "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), (2, 8, 20, 21)),
        "transposed": (lambda: nn.ConvTranspose2d(8, 4, 2, stride=2), (2, 8, 9, 10)),
        "max pool": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2)), (2, 3, 16, 18)),
        "average pool": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(3)), (2, 3, 9, 9)),
        "lstm": (first(lambda: nn.LSTM(16, 32, batch_first=True)), (4, 20, 16)),
        "gru": (first(lambda: nn.GRU(16, 32, batch_first=True)), (4, 20, 16)),
    }


def check_layers(device: str, dtype: str, rehearsal: bool) -> dict[str, Any]:
    """Compare layers, forwards and gradients, with PyTorch on the device.

    The bound is the engine's distance from PyTorch in float64 on the CPU: at most three times
    that of PyTorch's on the device, and a little: under autocast a rounding of bfloat16.
    """
    import torch

    from benchmarks.peers import precision
    from ortrain import ORTModule

    torch.backends.cudnn.allow_tf32 = False
    little = 1e-5 if dtype == "f32" else 4e-3

    def run(module: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        with precision(dtype, x.device.type):
            y = module(x)
        y.backward(weight.to(y.device, y.dtype).view(y.shape))
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return [t.detach().double().cpu() for t in (y, x.grad, *gradients)]

    def one(make: Callable[[], torch.nn.Module], shape: tuple[int, ...]) -> dict[str, Any]:
        torch.manual_seed(0)
        plain = make()
        x = torch.randn(shape)
        exact = copy.deepcopy(plain).double()
        with torch.no_grad():
            weight = torch.randn(copy.deepcopy(plain)(x).shape)
        truth_x = x.double().requires_grad_()
        y = exact(truth_x)
        y.backward(weight.double().view(y.shape))
        truth = [y.detach(), truth_x.grad, *(p.grad for p in exact.parameters())]
        theirs = run(copy.deepcopy(plain).to(device), x.to(device), weight)
        ours = ORTModule(plain.to(device))
        worst = 0.0
        for _ in range(3):  # the third step may be from a recording
            ours.zero_grad(set_to_none=True)
            mine = run(ours, x.to(device), weight)
            for got, other, right in zip(mine, theirs, truth, strict=True):
                size = float(right.norm()) + 1e-30
                apart = float((got - right).norm()) / size
                allowed = 3 * float((other - right).norm()) / size + little
                ratio = apart / allowed
                worst = max(worst, ratio if ratio == ratio else 1e30)
        report = ours.report()
        reasons = "; ".join(c.fallback for c in report.captures if c.fallback)
        return {"right": worst <= 1 and not reasons, "of allowed": worst, "reason": reasons}

    return {
        name: caught(functools.partial(one, make, shape))
        for name, (make, shape) in _layers(rehearsal).items()
    }


def _tiny_gpt2(device: str) -> Any:
    from ortrain.testing.models import CASES

    case = CASES["gpt2"]
    return case.build().to(device), {
        name: value.to(device) for name, value in case.batch(*case.sample, 0).items()
    }


def _counts(model: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for _, program in model._ortrain_engine.made_programs():
        for name, count in program.session.recordings.items():
            total[name] = total.get(name, 0) + count
    return total


def check_steps(device: str, dtype: str) -> dict[str, Any]:
    """Train a tiny GPT-2 for ten steps, beside PyTorch; say what was launched from recordings."""
    import torch

    from benchmarks.peers import precision
    from ortrain import ORTModule
    from ortrain.capture.signature import flatten_outputs

    def work() -> dict[str, Any]:
        plain, batch = _tiny_gpt2(device)
        ours = ORTModule(copy.deepcopy(plain))

        def train(model: Any) -> list[float]:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            losses = []
            for _ in range(10):
                optimizer.zero_grad(set_to_none=True)
                with precision(dtype, device):
                    outputs = flatten_outputs(model(**batch))[0]
                loss = next(o for o in outputs if o.dim() == 0)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            return losses

        # One after the other: what comes between moves the addresses that recordings go by.
        losses = list(zip(train(ours), train(plain), strict=True))
        worst = max(abs(mine - theirs) for mine, theirs in losses)
        bound = 1e-4 if dtype == "f32" else 2e-2
        counts = _counts(ours)
        wanted = device != "cpu" and os.environ.get("ORTRAIN_GPU_GRAPHS") == "1"
        right = worst <= bound and (counts["launched"] > 0 or not wanted)
        return {"right": right, "difference": worst, "losses": losses, "counts": counts}

    return caught(work)


def check_fault(device: str) -> dict[str, Any]:
    """Give a wrong label, then a hundred steps of right ones."""
    import torch

    from ortrain import ORTModule
    from ortrain.capture.signature import flatten_outputs
    from ortrain.optim import FusedAdamW

    def work() -> dict[str, Any]:
        plain, batch = _tiny_gpt2(device)
        ours = ORTModule(copy.deepcopy(plain))
        optimizer = FusedAdamW(ours.parameters(), lr=1e-4)
        other = torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=0.0)
        optimizer.param_groups[0]["weight_decay"] = 0.0

        def step(module: Any, labels: torch.Tensor) -> torch.Tensor:
            outputs = flatten_outputs(module(**{**batch, "labels": labels}))[0]
            loss = next(o for o in outputs if o.dim() == 0)
            loss.backward()
            return loss.detach()

        step(ours, batch["labels"])
        optimizer.zero_grad()
        wrong = batch["labels"].clone()
        wrong[0, 1] = 10**6
        error = ""
        try:
            for _ in range(3):  # it may show in a later call
                step(ours, wrong)
                torch.cuda.synchronize() if device != "cpu" else None
        except IndexError as raised:
            error = str(raised)
        optimizer.zero_grad()
        worst = 0.0
        for _ in range(100):
            mine = step(ours, batch["labels"])
            optimizer.step()
            optimizer.zero_grad()
            theirs = step(plain, batch["labels"])
            other.step()
            other.zero_grad()
            worst = max(worst, abs(float(mine) - float(theirs)))
        right = "1000000" in error and worst <= 1e-3
        return {"right": right, "error raised": error, "difference": worst}

    return caught(work)


def profile_step(device: str, rehearsal: bool) -> dict[str, Any]:
    """Return the kernels of a step of GPT-2 under bf16 autocast, longest first."""
    from benchmarks.gpu_all.kernels import trained
    from benchmarks.kernel_times import kernel_times

    def work() -> dict[str, Any]:
        side, step = trained(device, rehearsal=rehearsal)
        loss = float(step())
        times = kernel_times(step, device)
        described = side.describe()
        right = loss == loss and not described["fallback"]
        return {"right": right, "loss": loss, **times, **described}

    return caught(work)


# --- in the program


def measure_found(run: Run) -> dict[str, Any]:
    """Say what of the device and of NVIDIA's libraries is found, without PyTorch."""
    made = subprocess.run(
        [find_program(), "describe"],
        env=environment_of_program(),
        capture_output=True,
        text=True,
        timeout=run.seconds_left(),
        check=False,
    )
    text = (made.stdout + made.stderr).splitlines()
    missing = sum(line.startswith("no ") for line in text) + (made.returncode != 0)
    return {"missing": missing, "found": text}


def _ask(run: Run, function: str, environment: dict[str, str], **arguments: Any) -> Any:
    with Worker({**run.environment(), **environment}, None, run.deadline) as worker:
        return worker.ask("call", function=f"gpu_all.smoke:{function}", **arguments)


def measure_layers(run: Run, *, dtype: str) -> dict[str, Any]:
    """Compare layers in a worker."""
    made = _ask(run, "check_layers", {}, device=run.device, dtype=dtype, rehearsal=run.rehearsal)
    return {"wrong": sum(not each["right"] for each in made.values()), "layers": made}


def measure_steps(run: Run) -> dict[str, Any]:
    """Train with recordings and without, in both precisions; a process each."""
    made = {
        f"{dtype}, recordings {graphs}": _ask(
            run, "check_steps", {"ORTRAIN_GPU_GRAPHS": graphs}, device=run.device, dtype=dtype
        )
        for dtype in ("f32", "bf16")
        for graphs in ("0", "1")
    }
    return {"wrong": sum(not each["right"] for each in made.values()), "steps": made}


def measure_fault(run: Run) -> dict[str, Any]:
    """Give a wrong label in a worker."""
    made = _ask(run, "check_fault", {}, device=run.device)
    return {"wrong": int(not made["right"]), **made}


def measure_profile(run: Run) -> dict[str, Any]:
    """Profile a step in a worker."""
    made = _ask(run, "profile_step", {}, device=run.device, rehearsal=run.rehearsal)
    return {"wrong": int(not made["right"]), **made}


def _line(
    key: str, title: str, seconds: float, measure: Callable[[Run], dict[str, Any]], figure: str
) -> Line:
    return Line(key, "smoke", title, (Aim(figure, 0, most=True),), seconds, measure, check=True)


LINES: tuple[Line, ...] = (
    _line("found", "What is found of the device and its libraries", 30.0, measure_found, "missing"),
    _line(
        "layers-f32",
        "Single layers, forwards and gradients, float32",
        90.0,
        functools.partial(measure_layers, dtype="f32"),
        "wrong",
    ),
    _line(
        "layers-bf16",
        "The same under bf16 autocast",
        90.0,
        functools.partial(measure_layers, dtype="bf16"),
        "wrong",
    ),
    _line("steps", "Ten steps of a tiny GPT-2, recorded and not", 120.0, measure_steps, "wrong"),
    _line("fault", "A wrong label, then a hundred right steps", 60.0, measure_fault, "wrong"),
    _line("profile", "Kernels of a step of GPT-2 124M, 8×1024", 90.0, measure_profile, "wrong"),
)
