# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Gathers and scatters of elements whose index says the same along a row are those of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ortrain import ORTModule


class Indexed(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, index, updates):
        return self.function(x, index, updates)


OF_ROWS = {
    "expand": lambda x, i, u: x.gather(0, i[:, None].expand(-1, x.shape[1])) * u,
    "repeat": lambda x, i, u: x.gather(0, i[:, None].repeat(1, x.shape[1])) * u,
    "last axis": lambda x, i, u: x.t().gather(-1, i[None].expand(x.shape[1], -1)) * u.t(),
    "sum": lambda x, i, u: x.new_zeros(x.shape).scatter_add(0, i.view(-1, 1).expand_as(u), u) * x,
    "added": lambda x, i, u: x.scatter_add(0, i.view(-1, 1).expand_as(u), u),
}
OF_ELEMENTS = {
    "narrower": lambda x, i, u: x.scatter_add(0, i[:, None].expand_as(u[:, 1:]), u[:, 1:]),
    "the other axis": lambda x, i, u: (
        x.gather(1, (i[:, None] % 2).expand(-1, x.shape[1])[:3].contiguous()) * u[:3]
    ),
    "two sources": lambda x, i, u: x.gather(0, torch.stack([i, i.flip(0)], 1)) * u[:, :2],
}


def run(function, sizes):
    torch.manual_seed(0)
    module = Indexed(function)
    ours = ORTModule(module)
    for rows, columns, count in sizes:
        x = torch.randn(rows, columns, requires_grad=True)
        updates = torch.randn(count, columns, requires_grad=True)
        index = torch.randint(0, rows, (count,))
        results = []
        for model in (module, ours):
            y = model(x, index, updates)
            gradients = torch.autograd.grad(y.square().sum(), (x, updates))
            results.append((y, *gradients))
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)
    entries = ours._ortrain_engine.graphs()
    return {node["op"] for entry in entries for node in entry.captured.graph.nodes()}


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows(name):
    ops = run(OF_ROWS[name], [(7, 5, 9), (3, 8, 4), (4, 2, 1), (2, 3, 0)])
    assert not ops & {"GatherElements", "ScatterElements"}


@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_elements(name):
    ops = run(OF_ELEMENTS[name], [(7, 5, 9), (4, 6, 5)])
    assert ops & {"GatherElements", "ScatterElements"}
