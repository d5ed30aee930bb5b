# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Models train on the engine as they train in eager PyTorch."""

from __future__ import annotations

import copy
import importlib.util
import statistics
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.signature import flatten_outputs
from ortrain.testing.models import CASES, ModelCase

MODELS = (
    "mlp",
    "minilm",
    "bert",
    "bert_mlm",
    "distilbert",
    "gpt2",
    "llama",
    "vit",
    "resnet",
    "lstm",
    "encoder",
    "t5",
)
STEPS = 20
DROPOUT = 0.2
SEEDS = 24


def case_of(name: str) -> ModelCase:
    case = CASES[name]
    if case.needs and importlib.util.find_spec(case.needs) is None:
        pytest.fail(f"package {case.needs} is missing: run make setup")
    return case


def forward(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    outputs, _ = flatten_outputs(model(**batch))
    return next(o for o in outputs if o.dim() == 0), outputs


def set_dropout(model: nn.Module, rate: float) -> bool:
    """Turn dropout on wherever the model has a place for it; tell whether there is one."""
    found = False
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = rate
            found = True
        # Rates that attention layers keep as plain numbers.
        for name in ("attention_dropout", "attn_dropout", "dropout_prob", "dropout"):
            if isinstance(vars(part).get(name), float):
                setattr(part, name, rate)
                found = True
    return found


def assert_close(ours: torch.Tensor, plain: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        ours, plain, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", MODELS)
def test_follows_eager(name: str) -> None:
    case = case_of(name)
    plain = case.build()
    ours = ORTModule(copy.deepcopy(plain))

    for size in (case.sample, case.other):  # where it was captured, and at another shape
        batch = case.batch(*size, 1)
        for model in (ours, plain):
            model.zero_grad()
        loss, outputs = forward(ours, batch)
        expected_loss, expected = forward(plain, batch)
        loss.backward()
        expected_loss.backward()
        for i, (a, b) in enumerate(zip(outputs, expected, strict=True)):
            assert_close(a, b, f"output {i} at {size}")
        for (key, p), (_, q) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), key
            if q.grad is not None:
                assert_close(p.grad, q.grad, f"gradient of {key} at {size}")
        for (key, p), (_, q) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
            assert_close(p, q, f"buffer {key} at {size}")

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (ours, plain)]
    for step in range(STEPS):
        batch = case.batch(*(case.sample, case.other)[step % 2], 10 + step)
        losses = []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss, _ = forward(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-5, rel=1e-5), f"step {step}"
    report = ours.report()
    assert report.native_share == 1.0, str(report)
    assert len(report.captures) == 1, str(report)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        m if m in ("mlp", "bert", "gpt2") else pytest.param(m, marks=pytest.mark.slow)
        for m in MODELS
    ],
)
def test_follows_eager_under_autocast(name: str) -> None:
    """Roundings differ, places of casts do not: no further from float32 than PyTorch is."""
    case = case_of(name)
    plain = case.build()
    ours = ORTModule(copy.deepcopy(plain))
    batch = case.batch(*case.sample, 1)

    def run(model: nn.Module, enabled: bool) -> tuple[float, list[torch.Tensor | None]]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss, _ = forward(model, batch)
        loss.backward()
        return loss.item(), [p.grad for p in model.parameters()]

    _, exact = run(plain, False)
    theirs, expected = run(plain, True)
    mine, got = run(ours, True)
    assert mine == pytest.approx(theirs, rel=1e-2)
    norm = torch.stack([g.norm() for g in exact if g is not None]).norm()
    for (key, _), a, b, truth in zip(plain.named_parameters(), got, expected, exact, strict=True):
        assert (a is None) == (b is None), key
        if a is not None:
            assert a.dtype == b.dtype, key
            assert (a - truth).norm() < 2 * (b - truth).norm() + 0.002 * norm, key
    report = ours.report()
    assert report.native_share == 1.0, str(report)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [m for m in MODELS if m not in ("mlp", "resnet", "lstm", "minilm")]
)
def test_dropout(name: str) -> None:
    case = case_of(name)
    plain = case.build()
    assert set_dropout(plain, DROPOUT)
    ours = ORTModule(copy.deepcopy(plain))
    batch = case.batch(4, 16, 3)

    def run(model: nn.Module, seed: int) -> tuple[float, list[torch.Tensor]]:
        torch.manual_seed(seed)
        model.zero_grad()
        loss, _ = forward(model, batch)
        loss.backward()
        return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    first, gradients = run(ours, 5)
    again, repeated = run(ours, 5)
    assert first == again
    assert all(torch.equal(a, b) for a, b in zip(gradients, repeated, strict=True))

    def losses(model: nn.Module) -> list[float]:
        results = []
        with torch.no_grad():
            for seed in range(SEEDS):
                torch.manual_seed(100 + seed)
                results.append(forward(model, batch)[0].item())
        return results

    mine, theirs = losses(ours), losses(plain)
    assert len(set(mine)) > SEEDS // 2, "dropout is on, so losses differ from seed to seed"
    spread = statistics.stdev(theirs)
    error = spread * (2 / SEEDS) ** 0.5
    assert abs(statistics.mean(mine) - statistics.mean(theirs)) < 4 * error + 1e-6
    assert 0.4 < statistics.stdev(mine) / spread < 2.5


@pytest.mark.slow
def test_mean_gradient_over_masks_agrees() -> None:
    """A mask drawn differently in the backward, or scaled wrongly, would move the mean gradient."""
    masks, directions = 200, 64
    plain = case_of("bert").build()
    assert set_dropout(plain, DROPOUT)
    ours = ORTModule(copy.deepcopy(plain))
    batch = case_of("bert").batch(4, 16, 3)
    size = sum(p.numel() for p in plain.parameters())
    projection = torch.randn(directions, size, generator=torch.Generator().manual_seed(0))

    def gradients(model: nn.Module) -> torch.Tensor:
        rows = []
        for seed in range(masks):
            torch.manual_seed(1000 + seed)
            model.zero_grad(set_to_none=False)
            forward(model, batch)[0].backward()
            parts = [
                torch.zeros(p.numel()) if p.grad is None else p.grad.flatten()
                for p in model.parameters()
            ]
            rows.append(projection @ torch.cat(parts))
        return torch.stack(rows).double()

    mine, theirs = gradients(ours), gradients(plain)
    variances = (mine.var(0), theirs.var(0))
    z = (mine.mean(0) - theirs.mean(0)) / ((variances[0] + variances[1]) / masks).sqrt()
    # 64 squares of nearly standard normal numbers: their mean is 1, give or take 0.18.
    assert z.square().mean() < 2, z
    assert z.abs().max() < 5, z
    assert 0.8 < (variances[0] / variances[1]).log().mean().exp() < 1.25
