# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainer follows PyTorch for 50 steps on six models with four optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from ortrain import ORTTrainer, ORTTrainerOptions, optim
from ortrain.capture.signature import CallSignature, flatten_outputs
from ortrain.capture.use_cache import without_cache
from ortrain.testing.models import CASES

MODELS = ("mlp", "encoder", "bert", "gpt2", "llama", "vit")
STEPS = 50
RATE = 2e-3


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, algorithm 2) by its formula, in float64."""

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["p"] = p.double()
                state["m"] = torch.zeros_like(p, dtype=torch.float64)
                state["v"] = torch.zeros_like(p, dtype=torch.float64)
            g = p.grad.double()
            state["m"].lerp_(g, 0.1)
            state["v"].lerp_(g * g, 0.001)
            update = state["m"] / (state["v"].sqrt() + 1e-6) + 0.01 * state["p"]
            norms = state["p"].norm(), update.norm()
            ratio = norms[0] / norms[1] if norms[0] > 0 and norms[1] > 0 else 1.0
            state["p"] -= RATE * ratio * update
            p.copy_(state["p"])


Pair = tuple[Callable[[], Any], Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: dict[str, Pair] = {
    "sgd": (
        lambda: optim.SGDConfig(lr=RATE, momentum=0.9),
        lambda p: torch.optim.SGD(p, RATE, momentum=0.9),
    ),
    "adam": (
        lambda: optim.AdamConfig(lr=RATE, lambda_coef=0.01, epsilon=1e-6, weight_decay_mode=2),
        lambda p: torch.optim.Adam(p, RATE, weight_decay=0.01, eps=1e-6),
    ),
    "adamw": (
        lambda: optim.AdamConfig(lr=RATE, lambda_coef=0.01, epsilon=1e-6),
        lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.01, eps=1e-6),
    ),
    "lamb": (lambda: optim.LambConfig(lr=RATE, lambda_coef=0.01), Lamb),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_losses_equal_pytorchs_to_five_decimals(model: str, optimizer: str) -> None:
    case = CASES[model]
    if case.needs:
        pytest.importorskip(case.needs)
    torch.manual_seed(0)
    module = case.build()
    other = copy.deepcopy(module)
    make_config, make_optimizer = OPTIMIZERS[optimizer]
    theirs = make_optimizer(other.parameters())

    def batch(step: int) -> dict[str, torch.Tensor]:
        size, length = case.sample if step % 3 else case.other
        given = case.batch(size, length, step % 7)
        call = CallSignature(module.forward).flatten((), given)
        return dict(zip(call.names, call.tensors, strict=True))

    shapes = {name: [f"{name}.{i}" for i in range(t.dim())] for name, t in batch(0).items()}
    trainer = ORTTrainer(
        module,
        {"inputs": list(shapes.items()), "outputs": [("loss", [], True)]},
        make_config(),
        options=ORTTrainerOptions({"utils": {"grad_norm_clip": False}}),
    )
    for step in range(STEPS):
        given = batch(step)
        loss = trainer.train_step(**given)
        theirs.zero_grad()
        with without_cache(other):
            expected = flatten_outputs(other(**given))[0][0]
        expected.backward()
        theirs.step()
        assert abs(loss.item() - expected.item()) < 1e-5, f"step {step}"
