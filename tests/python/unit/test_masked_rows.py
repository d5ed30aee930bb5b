# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention whose mask moves all scores of a query far down: each key then has the same share."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortrain import ORTModule


class _Biased(nn.Module):
    """Attention with a bias that is trained and numbers that hide keys."""

    def __init__(self, keys: int, fill: float, heads: int = 2) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8 * heads), nn.Linear(8, 8 * heads)
        self.bias = nn.Parameter(torch.randn(1, heads, keys, keys))
        self.fill, self.heads = fill, heads

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(keep.shape, dtype=x.dtype).masked_fill(~keep, self.fill)
        mask = self.bias + hidden[:, None, None, :]
        q, k = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k))
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9, -1e4, 1e9])
@pytest.mark.parametrize("keys", [5, 70, 300])
def test_gradients_behind_rows_that_a_mask_hides(
    keys: int, fill: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    eager = _Biased(keys, fill).to(dtype)
    module = ORTModule(copy.deepcopy(eager))
    x = torch.randn(3, keys, 8, dtype=dtype)
    keep = torch.ones(3, keys, dtype=torch.bool)
    keep[0] = False
    keep[1, keys // 2 :] = False
    wanted = eager(x, keep)
    wanted.square().sum().backward()
    # Where scores keep their differences, they are rounded in another order.
    tolerance = 2e-3 if fill == -1e4 and dtype == torch.float32 else 2e-4
    result = module(x, keep)
    result.square().sum().backward()
    torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)
    for (name, a), b in zip(eager.named_parameters(), module.parameters(), strict=True):
        scale = float(a.grad.abs().max())
        difference = float((a.grad - b.grad).abs().max())
        assert difference <= tolerance * scale + 1e-12, name
