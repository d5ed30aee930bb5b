# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Training in 16 bits is no further from float64 than PyTorch's autocast is, on six models.

Also where the processor has no instructions for them: the kernels that widen are asked for.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule, ORTTrainer, ORTTrainerOptions, optim
from ortrain.capture.signature import CallSignature, flatten_outputs
from ortrain.capture.use_cache import without_cache
from ortrain.testing.models import CASES

pytestmark = pytest.mark.slow

MODELS = ("mlp", "encoder", "bert", "gpt2", "llama", "vit")
STEPS = 10
RATE = 0.005
# A tenth of what two curves may differ by and count as equal.
SLACK = 1e-4


def batch(case: Any, module: nn.Module, step: int) -> dict[str, torch.Tensor]:
    call = CallSignature(module.forward).flatten((), case.batch(*case.sample, step % 2))
    return dict(zip(call.names, call.tensors, strict=True))


def eager(
    case: Any, module: nn.Module, dtype: torch.dtype | None, run: nn.Module | None = None
) -> list[float]:
    """Train with torch.optim; ``run`` stands for the module where it is another object."""
    run = module if run is None else run
    optimizer = torch.optim.SGD(module.parameters(), RATE, momentum=0.9)
    wide = next(module.parameters()).dtype
    losses = []
    for step in range(STEPS):
        given = {
            k: v.to(wide) if v.is_floating_point() else v
            for k, v in batch(case, module, step).items()
        }
        optimizer.zero_grad()
        with (
            without_cache(module),
            torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None),
        ):
            loss = flatten_outputs(run(**given))[0][0]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def native(case: Any, module: nn.Module, mixed: dict[str, Any]) -> list[float]:
    """Train with ORTTrainer."""
    shapes = {
        name: [f"{name}.{i}" for i in range(t.dim())] for name, t in batch(case, module, 0).items()
    }
    trainer = ORTTrainer(
        module,
        {"inputs": list(shapes.items()), "outputs": [("loss", [], True)]},
        optim.SGDConfig(lr=RATE, momentum=0.9),
        options=ORTTrainerOptions(
            {"utils": {"grad_norm_clip": False}, "mixed_precision": {"enabled": True, **mixed}}
        ),
    )
    return [trainer.train_step(**batch(case, module, step)).item() for step in range(STEPS)]


def distance(losses: list[float], truth: list[float]) -> float:
    return float((torch.tensor(losses) - torch.tensor(truth)).square().mean().sqrt())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_loss_parity(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    torch.manual_seed(0)
    plain = case.build()
    truth = eager(case, copy.deepcopy(plain).double(), None)
    bound = 2 * distance(eager(case, copy.deepcopy(plain), dtype), truth) + SLACK
    assert abs(truth[-2] - truth[0]) > 20 * bound  # training moves it by far more
    wrapped = copy.deepcopy(plain)
    curves = {
        "ORTModule": eager(case, wrapped, dtype, ORTModule(wrapped)),
        "ORTTrainer": native(case, copy.deepcopy(plain), {"dtype": dtype}),
        # A list that changes nothing takes the rewrite of the graph in place of autocast.
        "lists": native(case, copy.deepcopy(plain), {"dtype": dtype, "promote": ["Relu"]}),
    }
    for which, losses in curves.items():
        assert distance(losses, truth) <= bound, (which, losses, truth)


SCRIPT = """
import copy, json, sys, torch
sys.path.insert(0, "tests/python/models")
import test_mixed_precision as t
from ortrain import ORTModule, _core
case = t.CASES["gpt2"]
torch.manual_seed(0)
plain = case.build()
wrapped = copy.deepcopy(plain)
curves = {"torch.bfloat16": t.eager(case, wrapped, torch.bfloat16, ORTModule(wrapped)),
          "torch.float16": t.native(case, plain, {"dtype": torch.float16})}
print(json.dumps([curves, _core.gemm_backend()]))
"""
# What the library for products may use, and which products are the engine's own.
RESTRICTIONS = {
    "as it is": {},
    "library without 16-bit instructions": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "own products": {"ORTRAIN_BLAS": "none"},
}


@pytest.mark.long
def test_results_agree_without_16_bit_instructions() -> None:
    pytest.importorskip("transformers")
    curves = {}
    for name, environment in RESTRICTIONS.items():
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        curves[name], products = json.loads(result.stdout.splitlines()[-1])
        if environment:
            assert "bf16" not in products, name
    expected = curves.pop("as it is")
    for name, got in curves.items():
        for dtype, bound in (("torch.bfloat16", 2e-2), ("torch.float16", 4e-3)):
            assert got[dtype] == pytest.approx(expected[dtype], abs=bound), (name, dtype)
