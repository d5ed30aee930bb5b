# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Extents that are 1, of which operators make other shapes, at the first call and at later ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortrain import ORTModule


class Scaled(nn.Module):
    def __init__(self, run: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 3.0, dtype=torch.float64))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x * self.scale)


def _unbound(y: torch.Tensor) -> torch.Tensor:
    first = y.narrow(0, 0, max(1, y.shape[0] - 1)).unbind(0)[0]
    return first[1 % max(1, first.shape[0]) :]


# Some of the shapes make an extent 1 that is computed, others do not.
CASES: dict[str, tuple[Callable[[torch.Tensor], Any], list[tuple[int, ...]]]] = {
    "convolution over all": (
        lambda y: F.conv1d(y, torch.ones(8, 4, 5).double()).squeeze(-1),
        [(3, 4, 5), (3, 4, 9), (1, 4, 6), (1, 4, 5), (2, 4, 5)],
    ),
    "means of what was squeezed": (
        lambda y: F.conv1d(y, torch.ones(8, 4, 5).double()).squeeze(-1).mean(-1),
        [(3, 4, 9), (3, 4, 5)],
    ),
    "every axis": (
        lambda y: F.avg_pool2d(y, 7).squeeze(),
        [(3, 2, 7, 7), (1, 2, 14, 7), (3, 1, 14, 14)],
    ),
    "several axes": (
        lambda y: y[:, : y.shape[1] // 4].squeeze((1, 2)),
        [(3, 4, 2), (3, 8, 1), (2, 4, 1)],
    ),
    "a slice": (lambda y: y[: y.shape[0] - 1].squeeze(0), [(2, 4), (3, 4), (2, 5)]),
    "windows": (lambda y: y.unfold(1, 3, 1).squeeze(1), [(2, 3), (2, 5), (1, 3)]),
    "unbound": (_unbound, [(2, 3), (3, 3), (2, 5)]),
    "in place": (lambda y: y[:, 1:].clone().squeeze_(1), [(3, 2), (3, 4)]),
}


@pytest.mark.parametrize("case", CASES)
def test_shapes_are_those_of_pytorch(case: str) -> None:
    run, shapes = CASES[case]
    for first in (0, 1):  # which of the kinds is captured first
        plain = Scaled(run)
        ours = ORTModule(copy.deepcopy(plain))
        for shape in shapes[first:] + shapes[:first]:
            x = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
            expected, result = plain(x), ours(x)
            assert result.shape == expected.shape
            torch.testing.assert_close(result, expected)
            for module, y in ((plain, expected), (ours, result)):
                module.zero_grad()
                y.sin().sum().backward()
            torch.testing.assert_close(ours.scale.grad, plain.scale.grad)


def test_one_graph_serves_a_batch_of_one_where_no_batch_is_squeezed() -> None:
    ours = ORTModule(Scaled(lambda y: y.sum(-1, keepdim=True).squeeze(-1)))
    for rows in (1, 4, 1, 7):
        assert ours(torch.ones(rows, 3).double()).shape == (rows,)
    assert [record.fallback for record in ours.report().captures] == [""]


def test_a_squeezed_batch_of_one_has_a_graph_of_its_own() -> None:
    ours = ORTModule(Scaled(lambda y: y.sum(-1, keepdim=True).squeeze()))
    for rows in (4, 1, 7, 1):
        assert ours(torch.ones(rows, 3).double()).shape == ((rows,) if rows > 1 else ())
    assert [record.fallback for record in ours.report().captures] == ["", ""]


class Returned(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        part = y[..., : max(1, y.shape[-1] - 2)]
        if part.shape[-1] > 2:
            part.unfold(-1, 2, 1)
        if y.numel() % 2 == 0 and y.numel():
            torch.view_as_complex(y.reshape(-1, 2))
        return part


def test_views_of_results_whose_sizes_no_argument_tells() -> None:
    ours = ORTModule(Returned())
    for columns in (4, 6, 5, 3):
        x = torch.arange(3.0 * columns).reshape(3, columns)
        torch.testing.assert_close(ours(x), Returned()(x))
