# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Trainings on the device: step for step as PyTorch's, for long, and in two processes."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import ROOT, package_path
from benchmarks.gpu_all.line import Aim, Line, Run
from benchmarks.worker import Worker, WorkerEndedError, WorkerError

STEPS, _REHEARSED_STEPS = 10, 3
TOLERANCE = 1e-4  # of losses and gradients in float32, relative where numbers exceed 1
LOSS_TOLERANCE_16 = 2e-2
_REHEARSED_MODELS = ("mlp", "gpt2")


# --- in a worker


def follow(model: str, device: str, dtype: str, steps: int) -> dict[str, Any]:
    """Train one model of ``ortrain.testing.models`` on the engine and in PyTorch.

    In float32, losses of all steps and gradients of the first are compared. Under bf16 autocast
    two right results differ by rounding: gradients of the first step may be twice as far from
    PyTorch's float32 ones as PyTorch's own.

    Returns:
      "loss": the largest difference of a step's losses, relative; "gradient": the difference of the
      gradients over what is allowed; "right"; "native" share; "skipped": a package that is missing.
    """
    import torch

    from benchmarks.peers import precision
    from ortrain import ORTModule
    from ortrain.capture.signature import flatten_outputs
    from ortrain.testing.models import CASES

    case = CASES[model]
    if case.needs and importlib.util.find_spec(case.needs) is None:
        return {"skipped": case.needs}
    truth = case.build().to(device)
    plain = copy.deepcopy(truth)
    ours = ORTModule(copy.deepcopy(truth))
    batches = [
        {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in case.batch(*(case.sample, case.other)[step % 2], step).items()
        }
        for step in range(steps)
    ]

    def run(module: torch.nn.Module, step: int, kind: str) -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        # PyTorch rounds the operands of convolutions unless it is told not to.
        cudnn = torch.backends.cudnn
        exactly = cudnn.flags(
            enabled=cudnn.enabled, deterministic=cudnn.deterministic, allow_tf32=False
        )
        with exactly:
            with precision(kind, device):
                loss = next(o for o in flatten_outputs(module(**batches[step]))[0] if o.dim() == 0)
            loss.backward()
        return loss.detach()

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (ours, plain)]
    losses: list[float] = []
    gradient = 0.0
    for step in range(steps):
        mine, theirs = (float(run(m, step, dtype)) for m in (ours, plain))
        losses.append(_relative(mine, theirs))
        if step == 0:
            exact = None
            if dtype != "f32":
                run(truth, 0, "f32")
                exact = truth
            gradient = _gradient_difference(ours, plain, exact)
        for optimizer in optimizers:
            optimizer.step()
    report = ours.report()
    allowed = TOLERANCE if dtype == "f32" else LOSS_TOLERANCE_16
    worst = max(losses)
    reasons = "; ".join(r.fallback for r in report.captures if r.fallback)
    return {
        "loss": worst,
        "gradient": gradient,
        "right": worst <= allowed and gradient <= 1 and report.native_share > 0 and not reasons,
        "native": report.native_share,
        "reason": reasons,
    }


def _relative(a: float, b: float) -> float:
    difference = abs(a - b) / max(1.0, abs(b))
    return difference if math.isfinite(difference) else 1e30


def _gradient_difference(ours: Any, plain: Any, exact: Any) -> float:
    """Return the largest difference of a gradient over what is allowed; 1 is the bound."""
    worst = 0.0
    others = plain if exact is None else exact
    norms = [p.grad.double().norm() for p in others.parameters() if p.grad is not None]
    whole = float(sum(norm**2 for norm in norms)) ** 0.5
    named = zip(ours.named_parameters(), plain.parameters(), others.parameters(), strict=True)
    for (_, mine), theirs, truth in named:
        if (mine.grad is None) != (theirs.grad is None):
            return 1e30
        if mine.grad is None:
            continue
        if exact is None:
            apart = (mine.grad.double() - theirs.grad.double()).abs().max()
            bound = TOLERANCE * max(1.0, float(theirs.grad.abs().max()))
        else:
            apart = (mine.grad.double() - truth.grad.double()).norm()
            own = (theirs.grad.double() - truth.grad.double()).norm()
            bound = 2 * float(own) + 0.002 * whole
        ratio = float(apart) / bound if bound > 0 else float(apart) * 1e30
        worst = max(worst, ratio if math.isfinite(ratio) else 1e30)
    return worst


def soak(device: str, steps: int, warm_up: int) -> dict[str, Any]:
    """Train a small model for long.

    Returns:
      Bytes by which memory grew after the warm-up: "growth" on the device (in a rehearsal, of the
      process), "host growth"; "recordings" of the engine.
    """
    import torch

    from benchmarks.resources import resident_bytes
    from conformance.soak import Model
    from ortrain import ORTModule
    from ortrain.optim import FusedAdamW

    torch.manual_seed(0)
    model = ORTModule(Model().to(device))
    optimizer = FusedAdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(100, (4, 16)).to(device)

    def in_use() -> int:
        gc.collect()
        if device == "cpu":
            return resident_bytes()
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)

    before = on_host = 0
    for step in range(warm_up + steps):
        if step == warm_up:
            before, on_host = in_use(), resident_bytes()
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"growth": in_use() - before, "host growth": resident_bytes() - on_host, "steps": steps}


# --- in the program


def measure_parity(run: Run, *, dtype: str) -> dict[str, Any]:
    """Follow all models, one after the other."""
    from ortrain.testing.models import CASES

    names = _REHEARSED_MODELS if run.rehearsal else tuple(CASES)
    models: dict[str, dict[str, Any]] = {}
    worker: Worker | None = None
    try:
        for name in names:
            run.say(f"{name}, {dtype}")
            worker = worker or Worker(run.environment(), None, run.deadline)
            steps = _REHEARSED_STEPS if run.rehearsal else STEPS
            arguments = {"device": run.device, "dtype": dtype, "steps": steps}
            try:
                models[name] = worker.ask(
                    "call", function="gpu_all.training:follow", model=name, **arguments
                )
            except WorkerError as error:
                models[name] = {"right": False, "reason": str(error)}
                # After a fault of the device its process can do nothing more.
                if isinstance(error, WorkerEndedError) or run.device != "cpu":
                    worker.close()
                    worker = None
    finally:
        if worker is not None:
            worker.close()
    compared = {name: made for name, made in models.items() if "skipped" not in made}
    return {
        "wrong": sum(not made["right"] for made in compared.values()),
        "compared": len(compared),
        "largest loss difference": max((m.get("loss", 0.0) for m in compared.values()), default=0),
        "models": models,
    }


def measure_soak(run: Run) -> dict[str, Any]:
    """Train for long in a worker."""
    steps, warm_up = (20, 5) if run.rehearsal else (1000, 100)
    with Worker(run.environment(), None, run.deadline) as worker:
        return worker.ask(
            "call",
            function="gpu_all.training:soak",
            device=run.device,
            steps=steps,
            warm_up=warm_up,
        )


def measure_ranks(run: Run) -> dict[str, Any]:
    """Train in two processes on one device, and in PyTorch in one."""
    with tempfile.TemporaryDirectory(prefix="ortrain-ranks-") as folder:
        result = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "benchmarks.gpu_all.ranks"),
            *("--device", run.device, "--result", str(result)),
            *("--steps", "3" if run.rehearsal else "20"),
        ]
        path = package_path(os.environ.get("PYTHONPATH"))
        environment = {**os.environ, **run.environment(), "PYTHONPATH": path}
        environment.setdefault("OMP_NUM_THREADS", "1")
        run.say("two processes")
        try:
            made = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=run.seconds_left(),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"not done in {error.timeout:.0f} s") from error
        if made.returncode or not result.exists():
            errors = [line for line in made.stderr.splitlines() if "Error" in line]
            raise RuntimeError(f"status {made.returncode}: {(errors or ['no result'])[0].strip()}")
        return json.loads(result.read_text())


def _parity(dtype: str, words: str) -> Line:
    return Line(
        f"parity-{dtype}",
        "parity",
        f"Small models step for step as PyTorch on the device, {words}",
        (Aim("wrong", 0, most=True),),
        400.0,
        functools.partial(measure_parity, dtype=dtype),
        check=True,
    )


LINES: tuple[Line, ...] = (
    _parity("f32", "float32"),
    _parity("bf16", "bf16 autocast"),
    Line(
        "soak",
        "soak",
        "1000 steps: growth of PyTorch's allocated bytes",
        (Aim("growth", 0, most=True),),
        240.0,
        measure_soak,
        check=True,
    ),
    Line(
        "ddp",
        "soak",
        "DistributedDataParallel, two processes on one device, against one",
        (Aim("loss difference", TOLERANCE, most=True), Aim("ranks differ", 0, most=True)),
        200.0,
        measure_ranks,
        check=True,
    ),
)
