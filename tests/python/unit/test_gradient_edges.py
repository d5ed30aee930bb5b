# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients at the edges: zero everywhere, of scalars, of rows without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortrain import ORTModule

inf = float("inf")


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def assert_follows(function: Callable[..., Any], *tensors: torch.Tensor) -> ORTModule:
    plain, ours = Call(function), ORTModule(Call(function))
    found = []
    for model in (plain, ours):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        result = model(*leaves)
        results = result if isinstance(result, tuple) else (result,)
        sum(r.sum() for r in results if r.requires_grad).backward()
        found.append([*(r.detach() for r in results), *(leaf.grad for leaf in leaves)])
    for expected, actual in zip(*found, strict=True):
        assert (expected is None) == (actual is None)
        if expected is not None:
            torch.testing.assert_close(actual, expected, equal_nan=True)
    return ours


@pytest.mark.parametrize("name", ["ceil", "floor", "round", "sign", "trunc", "sgn", "fix"])
def test_steps_have_a_gradient_of_zeros(name: str) -> None:
    x = torch.tensor([-1.5, -0.0, 0.3, 2.5, inf, -inf])
    function = getattr(torch, name)
    for ours in (assert_follows(function, x), assert_follows(lambda x: function(x) + x * 2, x)):
        assert ours.report().native_share == 1.0


@pytest.mark.parametrize("rounding", ["floor", "trunc"])
def test_rounded_quotients_have_a_gradient_of_zeros(rounding: str) -> None:
    x, y = torch.tensor([[7.0, -7.0, 0.5, inf]]), torch.tensor([[2.0], [-3.0], [0.0], [inf]])
    assert_follows(lambda x, y: torch.div(x, y, rounding_mode=rounding), x, y)


def test_statistics_of_a_batch_norm_have_no_gradient() -> None:
    x, w = torch.randn(4, 3, 5), torch.rand(3)
    for training in (True, False):

        def function(x: torch.Tensor, w: torch.Tensor, training: bool = training) -> Any:
            mean, var = torch.zeros(3), torch.ones(3)
            y, save_mean, deviation = torch.native_batch_norm(
                x, w, None, mean, var, training, 0.1, 1e-5
            )
            return y * 2, save_mean, deviation

        assert_follows(function, x, w)


def test_rows_of_a_scalar() -> None:
    x, zero = torch.tensor(1.5), torch.tensor([0])
    assert_follows(lambda x: x.index_fill(0, zero, 3.0) + x, x)
    assert_follows(lambda x: x.index_select(0, zero), x)
    assert_follows(lambda x, y: x.index_add(0, zero, y), x, torch.tensor(2.5))
    assert_follows(lambda x, y: x.index_copy(0, zero, y), x, torch.tensor(2.5))


def test_a_row_without_values_has_a_softmax_of_zeros() -> None:
    x = torch.randn(3, 4)
    x[1] = -inf
    x[2, 1:3] = -inf
    ours = assert_follows(lambda x: torch.ops.aten._safe_softmax(x, -1) * torch.arange(4.0), x)
    assert ours.report().native_share == 1.0


@pytest.mark.filterwarnings("ignore:.*run in PyTorch")
def test_the_logarithm_of_a_small_probability_has_a_gradient() -> None:
    assert_follows(torch.special.log_ndtr, torch.tensor([-9.0, -4.0, 0.0, 3.0, 9.0]))


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
def test_no_difference_leaves_out_what_is_put_before() -> None:
    assert_follows(lambda x, y: torch.diff(x, n=0, prepend=y), torch.randn(3, 4), torch.randn(3, 1))
    assert_follows(lambda x, y: torch.diff(x, n=2, prepend=y), torch.randn(3, 4), torch.randn(3, 1))


@pytest.mark.parametrize(
    "function",
    [
        torch.abs,
        lambda x: x.norm(1),
        lambda x: torch.linalg.vector_norm(x, 1, dim=1),
        lambda x: nn.functional.l1_loss(x, torch.zeros_like(x)),
        lambda x: torch.sign(x) * x,
        lambda x: x.abs().square(),
    ],
)
def test_the_size_of_what_is_no_number_has_the_gradient_of_pytorch(
    function: Callable[..., Any],
) -> None:
    x = torch.tensor([[float("nan"), -0.0, 0.0, 2.0], [-3.0, inf, -inf, float("nan")]])
    assert assert_follows(function, x).report().native_share == 1


def test_gradients_without_gradients_do_not_pass_for_independent() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.ones(4)), 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight * self.scale) ** 3

    model = Scaled()
    x = torch.ones(2, 4, requires_grad=True)
    result = ORTModule(model)(x)
    model.scale = 2.0
    (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    for source in (x, model.weight):
        with pytest.raises(RuntimeError, match="have changed since its forward"):
            torch.autograd.grad(gradient.sum(), source, allow_unused=True, retain_graph=True)


KINKS: dict[str, Callable[..., Any]] = {
    "relu": functional.relu,
    "relu6": functional.relu6,
    "hardtanh": functional.hardtanh,
    "hardtanh 0 2": lambda x: functional.hardtanh(x, 0.0, 2.0),
    "clamp": lambda x: x.clamp(-1, 1),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.1),
    "prelu": lambda x: functional.prelu(x, torch.tensor([0.2])),
    "elu": lambda x: functional.elu(x, 2.0),
    "selu": functional.selu,
    "celu": lambda x: functional.celu(x, 2.0),
    "threshold": lambda x: functional.threshold(x, 0.0, 5.0),
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "hardshrink": functional.hardshrink,
    "softshrink": functional.softshrink,
    "softsign": functional.softsign,
    "abs": torch.abs,
    "sinc": torch.sinc,
    "smooth_l1": lambda x: functional.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "huber": lambda x: functional.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "l1": lambda x: functional.l1_loss(x, torch.zeros_like(x), reduction="none"),
    "hinge": lambda x: functional.hinge_embedding_loss(x, -torch.ones_like(x), reduction="none"),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "minimum": lambda x: torch.minimum(x, x.flip(0)),
    "cross": lambda x: functional.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
}


@pytest.mark.parametrize("name", KINKS)
def test_where_pieces_meet_the_slope_is_pytorchs(name: str) -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -3.0, 6.0, 1e-30, 7.0])
    assert_follows(KINKS[name], x)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_certain_probabilities_have_a_gradient(reduction: str) -> None:
    p = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.3, 1e-20])
    target = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.6, 1.0])
    weight = torch.rand(6)
    assert_follows(
        lambda p: functional.binary_cross_entropy(p, target, weight, reduction=reduction), p
    )


@pytest.mark.parametrize("target", [[0, -1, 0, 0], [3, 0, -1, 2], [3, 1, 0, 2], [-1, 0, 0, 0]])
def test_padding_of_the_multilabel_margin_loss(target: list[int]) -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.multilabel_margin_loss(x, target)

    found = []
    for net in (Loss(), ORTModule(Loss())):
        x = torch.linspace(-1, 2, 12).reshape(3, 4).requires_grad_()
        loss = net(x, torch.tensor([target] * 3))
        loss.backward()
        found.append([loss.detach(), x.grad])
    torch.testing.assert_close(found[1], found[0])


def test_a_floor_division_has_no_gradient_where_pytorch_has_none() -> None:
    for wrap in (Call, lambda function: ORTModule(Call(function))):
        x = torch.arange(3.0, requires_grad=True)
        with pytest.raises(RuntimeError, match="derivative for aten::floor_divide"):
            wrap(lambda x: x // 2)(x).sum().backward()
    ours = assert_follows(lambda x: x * (x // 2).detach(), torch.arange(3.0))
    assert ours.report().captures[0].fallback == ""
    ours = assert_follows(lambda x: x * torch.div(x, 2, rounding_mode="floor"), torch.arange(3.0))
    assert ours.report().captures[0].fallback == ""


def test_unpooling_refuses_indices_below_zero() -> None:
    def unpool(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return functional.max_unpool1d(x, indices, 2)

    x = torch.randn(1, 1, 3)
    assert_follows(unpool, x, torch.tensor([[[1, 2, 5]]]))
    with pytest.raises(RuntimeError, match="invalid max index"):
        ORTModule(Call(unpool))(x, torch.tensor([[[1, -2, 5]]]))
