# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTRAIN_CHECK_NAN names the operator and the layer of the first NaN."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ortrain
from ortrain import ORTModule

nan, inf = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_CHECK_NAN", "1")


class Logarithm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


class Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x.log(), 0.0).cumsum(0)


def network(layer: nn.Module) -> ORTModule:
    return ORTModule(nn.Sequential(nn.Flatten(), layer, nn.Softmax(-1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_first_operator_of_the_forward_is_named(dtype: torch.dtype) -> None:
    model = network(Logarithm())
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, -5.0, 6.0]], dtype=dtype)
    assert torch.isfinite(model(x.abs())).all()
    with pytest.raises(ortrain.NanError, match=r"(?s)result.*first NaN.*'1.*forward.*at \[1, 1\]"):
        model(x)
    assert torch.isfinite(model(x.abs())).all()


def test_the_first_operator_of_the_backward_is_named() -> None:
    model = network(Root())
    x = torch.tensor([[1.0, 0.0, 3.0]], requires_grad=True)
    y = model(x)
    with pytest.raises(ortrain.NanError, match=r"(?s)gradient of.*first NaN.*backward"):
        y.backward(torch.tensor([[1.0, inf, 1.0]]))
    assert x.grad is None


def test_arguments_parameters_and_incoming_gradients_are_named() -> None:
    layer = nn.Linear(3, 2)
    model = ORTModule(layer)
    x = torch.randn(4, 3)
    with pytest.raises(ortrain.NanError, match=r"input 'input': 12 of float32\[4, 3\] are NaN"):
        model(x * nan)
    with pytest.raises(ortrain.NanError, match=r"gradient handed in"):
        model(x).backward(torch.full((4, 2), nan))
    with torch.no_grad():
        layer.bias[1] = nan
    with pytest.raises(ortrain.NanError, match=r"'bias': 1 of float32\[2\] is NaN, .* \[1\]"):
        model(x)


def test_what_a_mask_hides_is_no_error() -> None:
    model, x = ORTModule(Masked()), torch.tensor([1.0, -2.0, 3.0])
    torch.testing.assert_close(model(x), Masked()(x))


def test_nothing_is_checked_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORTRAIN_CHECK_NAN")
    assert network(Logarithm())(torch.tensor([[-1.0, 1.0]])).isnan().any()


def test_a_refused_step_leaves_buffers_alone() -> None:
    model = ORTModule(nn.BatchNorm1d(3))
    model(torch.randn(4, 3))
    before = model.running_mean.clone()
    with pytest.raises(ortrain.NanError):
        model(torch.full((4, 3), nan))
    torch.testing.assert_close(model.running_mean, before)
