# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Conversions at second sizes, over nothing, and with numbers at the ends of their ranges: PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortrain import ORTModule

INF, NAN = float("inf"), float("nan")


class Applied(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.function = function

    def forward(self, *args: Any) -> torch.Tensor:
        return self.function(self.weight, *args)


def agree(function: Callable[..., torch.Tensor], *calls: tuple[Any, ...]) -> None:
    plain = Applied(function)
    ours = ORTModule(copy.deepcopy(plain))
    for args in calls:
        results = []
        for model in (ours, plain):
            model.zero_grad()
            result = model(*args)
            result.float().sum().backward()
            results.append((result.detach(), model.weight.grad))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5, equal_nan=True)
    assert all(not capture.fallback for capture in ours.report().captures)


def written(
    w: torch.Tensor, x: torch.Tensor, start: int, end: int | None, step: int
) -> torch.Tensor:
    y = x * w
    y[start:end:step] = 7.0
    return y


@pytest.mark.parametrize("end", [None, 1, -1, 4])
@pytest.mark.parametrize("start", [-4, -10, 0, 2, 9])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.sampled(10)
def test_slices_written_to_at_other_sizes(start: int, end: int | None, step: int) -> None:
    agree(
        lambda w, x: written(w, x, start, end, step), *((torch.ones(n, 3),) for n in (6, 3, 1, 4))
    )


def test_slices_whose_start_is_a_size() -> None:
    def last_rows(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(4, 3)
        y[-x.shape[0] - 1 :] = 0.5
        y[-x.shape[0] :] = x
        return y * w

    agree(last_rows, *((torch.ones(n, 3),) for n in (2, 4, 3)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64, torch.uint8])
def test_truth_of_nothing(dtype: torch.dtype) -> None:
    def chosen(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        truths = [x.any(), x.all(), x.any(0).any(), x.all(0).all()]
        return torch.stack([torch.where(t > 0, w * (t + 1), w) for t in truths])

    agree(chosen, *((torch.ones(n, 3).to(dtype),) for n in (2, 0, 5)))


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: F.huber_loss(x * w, x, delta=1e39),
        lambda w, x: F.huber_loss(x * w, x, delta=2.0, reduction="sum"),
        lambda w, x: F.huber_loss((x * w).half(), x.half(), delta=1e5),
        lambda w, x: torch.clamp(x.detach() * 0, w, w),
        lambda w, x: torch.clamp(x, w, w.detach().clamp(min=0.0)),
        lambda w, x: torch.div(x.half(), -0.7, rounding_mode="trunc") * w.half(),
        lambda w, x: torch.div(x.bfloat16() * 9, 0.3, rounding_mode="trunc") * w.bfloat16(),
        *(
            lambda w, x, pads=pads: F.pad(x[None] * w, pads, mode="circular")
            for pads in ((-1, 2), (2, -1), (-1, -1), (1, 1))
        ),
    ],
)
def test_functions(function: Callable[..., torch.Tensor]) -> None:
    agree(function, (torch.arange(6.0).view(2, 3),), (torch.arange(12.0).view(4, 3),))


@pytest.mark.parametrize("value", [5.0, -5.5, 1e20, 1e30, INF, NAN])
def test_quotients_of_numbers(value: float) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])

    def of_item(w: torch.Tensor, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x * w * (n.item() // 2)

    agree(of_item, (x, torch.tensor(3.0)), (x, torch.tensor(value, dtype=torch.float64)))
    agree(lambda w, x, n: x * w * (n // 2), (x, 3.5), (x, 4.5), (x, value))


def test_quotients_are_floors_of_exact_ones() -> None:
    """3 / 0.1 is 30 when rounded, and Python's 3 // 0.1 is 29."""
    calls = [(torch.ones(n, 3),) for n in (2, 3, 5)]
    agree(lambda w, x: F.pad(x * w, (0, int(x.shape[0] // 0.1))), *calls)
    agree(lambda w, x: x * w * (x.shape[0] // 0.25), *calls)
    agree(lambda w, x, k: x * w * (k // 0.1), *((torch.ones(2, 3), k) for k in (0.5, 0.75, 1.0)))
    agree(lambda w, x, k: x * w * (1 // k), *((torch.ones(2, 3), k) for k in (0.5, 0.1, 0.2)))
