# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What the backward computes again on GPUs instead of reading it, on the simulator."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from ortrain import ORTModule, _core
from ortrain.testing.models import CASES

pytestmark = pytest.mark.skipif(
    _core.gpu_platform() != "simulator", reason="this build has no simulator of the GPU provider"
)


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "1")


def activations(model: nn.Module, phase: str) -> list[tuple[int, int]]:
    """Return how many tensors the nodes of a phase that hold GPT-2's activation read and write."""
    [(_, program)] = model._ortrain_engine.made_programs()
    layers = {"forward": "mlp.act/", "backward": "mlp.c_fc/"}
    return [
        (len(node["inputs"]), len(node["outputs"]))
        for node in program.graph.nodes()
        if node["op"] == "Fused" and node["phase"] == phase and layers[phase] in node["name"]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_computes_activations_again(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["gpt2"]
    plain = case.build()
    batch = case.batch(*case.sample, 1)
    made = []
    for disabled, written in (("", 1), ("recompute_elementwise", 4)):
        monkeypatch.setenv("ORTRAIN_DISABLE_PASSES", disabled)
        model = ORTModule(copy.deepcopy(plain))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            model(**batch).loss.backward()
        assert activations(model, "forward") == [(1, written)] * 2
        # Its input and the gradient of its result; else what the forward has written, too.
        assert activations(model, "backward") == [(2 if written == 1 else 5, 1)] * 2
        made.append(model)
    for (name, p), (_, q) in zip(*(m.named_parameters() for m in made), strict=True):
        assert torch.equal(p.grad, q.grad), name
    if dtype == torch.float32:
        plain(**batch).loss.backward()
        for (name, p), (_, q) in zip(
            made[0].named_parameters(), plain.named_parameters(), strict=True
        ):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_cpu_keeps_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "0")
    case = CASES["gpt2"]
    model = ORTModule(case.build())
    model(**case.batch(*case.sample, 1)).loss.backward()
    assert activations(model, "forward") == [(1, 4)] * 2


class Kept(nn.Module):
    """A value that is stored, and used unrounded where it is made: 16 bits tell the two apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = nn.functional.silu(self.linear(x))
        chosen = torch.where(first > 0.1, first, torch.sigmoid(first)).abs()
        scaled = chosen * self.scale.sigmoid()
        # The gradient of a maximum asks which element is equal to it.
        return (scaled - scaled.amax(-1, keepdim=True)) * self.scale, first


class RandomElementwise(nn.Module):
    """Operators drawn by a seed, some of whose values are results."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.linear = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.randn(8))
        kinds = draw.choices(range(14), k=draw.randint(5, 12))
        self.steps = [(kind, draw.random(), draw.random()) for kind in kinds]
        self.results = [draw.random() for _ in range(draw.randint(0, 2))]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [self.linear[0](x)]
        for kind, at, other in self.steps:
            u = values[-1 - int(at * at * len(values))]
            v = values[-1 - int(other * len(values))]
            made = (
                lambda u=u: nn.functional.gelu(u, approximate="tanh"),
                lambda u=u: nn.functional.silu(u),
                lambda u=u, v=v: u * torch.tanh(v),
                lambda u=u, v=v: u - 0.5 * v,
                lambda u=u, v=v: torch.where(u > v, 1.5 * u, v),
                lambda u=u, v=v: torch.where(u > 0.1, u, torch.sigmoid(v)),
                lambda u=u: u.abs() + 0.1,
                lambda u=u: u * self.scale.sigmoid(),
                lambda u=u: self.linear[1](u),
                lambda u=u: self.norm(u),
                lambda u=u: u - u.mean(-1, keepdim=True),
                lambda u=u: u - u.amax(-1, keepdim=True),
                lambda u=u, v=v: u / (1 + v.abs()),
                lambda u=u: u.bfloat16().tanh().float(),
            )[kind]()
            values.append(made)
        return (values[-1], *(values[int(at * len(values))] for at in self.results))


def gradients(module: nn.Module, dtype: torch.dtype) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of a step, and how many values the forward's Fused nodes write."""
    model = ORTModule(copy.deepcopy(module))
    torch.manual_seed(1)
    x = torch.randn(5, 6, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        results = model(x)
    loss = sum((r.float() * torch.randn(r.shape)).sum() for r in results)
    loss.backward()
    [(_, program)] = model._ortrain_engine.made_programs()
    nodes = program.graph.nodes()
    fused = [n for n in nodes if n["op"] == "Fused" and n["phase"] == "forward"]
    parameters = [p.grad for p in model.parameters() if p.grad is not None]
    return [x.grad, *parameters], sum(len(n["outputs"]) for n in fused)


def both(module: nn.Module, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Compare gradients with and without the pass, bit by bit."""
    monkeypatch.setenv("ORTRAIN_DISABLE_PASSES", "recompute_elementwise")
    expected, before = gradients(module, dtype)
    monkeypatch.setenv("ORTRAIN_DISABLE_PASSES", "")
    actual, after = gradients(module, dtype)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()
        assert a.isfinite().all()
    return before, after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_stored_and_used_unrounded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    both(Kept(), dtype, monkeypatch)


def test_random_programs_have_the_gradients_that_they_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fewer = 0
    for seed in range(12):
        torch.manual_seed(seed)
        before, after = both(RandomElementwise(seed), torch.bfloat16, monkeypatch)
        fewer += after < before
    assert fewer >= 4
