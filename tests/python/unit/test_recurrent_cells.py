# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Loops over cells of recurrent layers: taken apart where they stand, and computed as PyTorch does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture import decomposition
from ortrain.capture.recurrent_cells import CELLS

KINDS: dict[str, tuple[type[nn.RNNCellBase], dict[str, Any]]] = {
    "lstm_cell": (nn.LSTMCell, {}),
    "gru_cell": (nn.GRUCell, {}),
    "rnn_tanh_cell": (nn.RNNCell, {}),
    "rnn_relu_cell": (nn.RNNCell, {"nonlinearity": "relu"}),
}


class Loop(nn.Module):
    """A cell over the steps of x [steps, rows, 4]."""

    def __init__(self, kind: str, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        cls, options = KINDS[kind]
        self.cell = cls(4, 5, bias=bias, dtype=dtype, **options)
        self.head = nn.Linear(5, 4, dtype=dtype)
        self.has_two = cls is nn.LSTMCell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[1], 5)
        made = []
        for step in x:
            if self.has_two:
                h, c = self.cell(step, (h, c))
            else:
                h = self.cell(step, h)
            made.append(self.head(h))
        return torch.stack(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_formulas_are_pytorchs(kind: str, bias: bool, dtype: torch.dtype) -> None:
    op = getattr(torch.ops.aten, kind).default
    factor = {"lstm_cell": 4, "gru_cell": 3}.get(kind, 1)
    x, h, c = (torch.randn(3, n, dtype=dtype) for n in (4, 5, 5))
    weights = [torch.randn(5 * factor, n, dtype=dtype) for n in (4, 5)]
    weights += [torch.randn(5 * factor, dtype=dtype) for _ in range(2)] if bias else []
    given = [x, [h, c] if kind == "lstm_cell" else h, *weights]
    made, wanted = CELLS[op](*given), op(*given)
    tolerance = 8 * torch.finfo(dtype).eps  # kernels differ by how memory is ordered
    torch.testing.assert_close(made, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loops_follow_pytorch(kind: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    run = decomposition.run_decompositions
    monkeypatch.setattr(
        decomposition, "run_decompositions", lambda *args: traced.append(args) or run(*args)
    )
    plain = Loop(kind)
    ours = ORTModule(copy.deepcopy(plain))
    tolerance = 0.05 if autocast else 1e-5
    for rows in (3, 2, 1):
        x = torch.randn(4, rows, 4)
        results = []
        for module in (ours, plain):
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                results.append(module(x))
            results[-1].float().square().sum().backward()
        torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            assert (p.grad - q.grad).norm() <= tolerance * q.grad.norm()
    assert ours.report().native_share == 1.0
    assert autocast or not traced  # whole programs
