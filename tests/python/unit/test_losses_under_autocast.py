# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Cross entropy under autocast: 16-bit logits, a loss in float, as PyTorch has it."""

import copy

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture import autocast_regions, operator_internals
from ortrain.capture.captured import AutocastState
from ortrain.capture.trace_internals import nodes_of


class Classifier(nn.Module):
    def __init__(self, reduction: str, flat: bool, wide: bool, smoothing: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)
        self.reduction, self.flat, self.wide, self.smoothing = reduction, flat, wide, smoothing

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x)
        if self.wide:
            logits = logits.float()
        if self.flat:
            logits, labels = logits.flatten(0, 1), labels.flatten()
        else:
            logits = logits.transpose(1, 2)
        loss = nn.functional.cross_entropy(
            logits, labels, reduction=self.reduction, label_smoothing=self.smoothing
        )
        return loss.mean() if self.reduction == "none" else loss


class Likelihood(Classifier):
    """The same by the negative log likelihood."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x).log_softmax(-1)
        if self.flat:
            logits, labels = logits.flatten(0, 1), labels.flatten()
        else:
            logits = logits.transpose(1, 2)
        loss = nn.functional.nll_loss(logits, labels, reduction=self.reduction)
        return loss.mean() if self.reduction == "none" else loss


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("flat", [True, False])
def test_likelihood_is_pytorchs(
    reduction: str, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    torch.manual_seed(0)
    # The logarithms are rounded to 16 bits in PyTorch alone: losses are as far from the exact one.
    assert_same_loss(Likelihood(reduction, flat, False, 0.0), rounds=True)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(("wide", "smoothing"), [(True, 0.0), (False, 0.0), (True, 0.1)])
def test_loss_is_pytorchs(
    reduction: str, flat: bool, wide: bool, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    torch.manual_seed(0)
    assert_same_loss(Classifier(reduction, flat, wide, smoothing))


def assert_same_loss(plain: nn.Module, rounds: bool = False) -> None:
    ours, exact = ORTModule(copy.deepcopy(plain)), copy.deepcopy(plain)
    for rows in (2, 3):
        x, labels = torch.randn(rows, 5, 8), torch.randint(0, 5, (rows, 5))
        labels[0, 1] = -100
        made = []
        for model, on in ((ours, True), (plain, True), (exact, False)):
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                loss = model(x, labels)
            loss.backward()
            made.append((loss.detach(), next(model.parameters()).grad.clone()))
        assert made[0][0].dtype == made[1][0].dtype == torch.float32
        if rounds:
            mine, theirs = ((made[i][0] - made[2][0]).abs() for i in (0, 1))
            assert mine <= 1.5 * theirs + 1e-5
        else:
            torch.testing.assert_close(made[0][0], made[1][0], rtol=1e-5, atol=1e-5)
        apart, theirs = ((made[i][1] - made[2][1]).norm() for i in (0, 1))
        assert apart <= 1.5 * theirs + 1e-6


class OnCuda(nn.Module):
    """Operators whose parts CUDA's autocast runs in float32, under autocast and in a region without."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(x, labels) + torch.square(x).sum()
        nearest = nn.functional.interpolate(x[None], scale_factor=2.0).mean()
        with torch.autocast("cuda", enabled=False):
            outside = nn.functional.cross_entropy(2 * x, labels)
        return loss + nearest + outside


def test_cudas_autocast_runs_parts_of_operators_in_float(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a CUDA build there are no such tensors: the operands are said to be there.
    monkeypatch.setattr(autocast_regions, "_device_of", lambda node: "cuda")
    x, labels = torch.randn(4, 6, dtype=torch.bfloat16), torch.tensor([0, 5, 2, 1])
    program = torch.export.export(OnCuda(), (x, labels))
    state = AutocastState((("cuda", torch.bfloat16),))
    autocast_regions.composites_in_float(program, state)
    found: dict[str, list[torch.dtype]] = {}
    for node in nodes_of(program):
        if operator_internals.hides_float(node.target, "cuda"):
            operand = node.all_input_nodes[0]
            found.setdefault(node.target.overloadpacket.__name__, []).append(
                operand.meta["val"].dtype
            )
    losses = found.pop("cross_entropy_loss")
    assert sorted(map(str, losses)) == ["torch.bfloat16", "torch.float32"]
    assert found
    assert all(dtypes == [torch.float32] for dtypes in found.values())


def test_no_operator_is_cast_without_cudas_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast_regions, "_device_of", lambda node: "cuda")
    x, labels = torch.randn(4, 6, dtype=torch.bfloat16), torch.tensor([0, 5, 2, 1])
    program = torch.export.export(OnCuda(), (x, labels))
    before = str(program.graph)
    autocast_regions.composites_in_float(program, AutocastState((("cpu", torch.bfloat16),)))
    assert str(program.graph) == before
