# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What the backward computes again on GPUs instead of reading it, on the simulator."""

from __future__ import annotations

import copy

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
    [(_, program)] = model.__dict__["_ortrain_engine"].made_programs()
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
