# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Data of sizes 0, 1 and odd ones, after a capture at ordinary sizes: PyTorch's numbers or its refusal."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortrain import ORTModule

Function = Callable[[torch.Tensor], torch.Tensor]
CASES: dict[str, tuple[Function, tuple[int, ...]]] = {
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 8, 8)),
    "avg_pool_ceil": (lambda x: F.avg_pool2d(x, 2, ceil_mode=True), (2, 3, 8, 8)),
    "adaptive_pool": (lambda x: F.adaptive_avg_pool2d(x, 3), (2, 3, 9, 9)),
    "pool_of_half": (lambda x: F.avg_pool1d(x, x.shape[-1] // 2), (2, 3, 8)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=1.5), (2, 3, 4, 4)),
    "chunks": (lambda x: torch.cat([c * i for i, c in enumerate(x.chunk(3, 1))], 1), (2, 9)),
    "logsumexp": (lambda x: x.logsumexp(-1), (2, 9)),
    "maximum": (lambda x: x.max(dim=1)[0], (2, 9)),
    "std": (lambda x: x.std(1), (2, 9)),
    "halves": (lambda x: x[:, : x.shape[1] // 2] * x[:, -(x.shape[1] // 2) :], (4, 6)),
    "reflected": (lambda x: F.pad(x, (1, 2), mode="reflect"), (2, 3, 9)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), (2, 2, 6, 8)),
    "cross_entropy": (lambda x: F.cross_entropy(x, (x[:, 0] > 0).long()), (5, 9)),
    "squeeze": (lambda x: x.squeeze() * 2, (5, 5)),
    "windows": (lambda x: x.unfold(-1, 4, 2), (2, 9)),
}


class Scaled(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return CASES[self.name][0](x * self.scale)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_sizes_that_come_later(name: str) -> None:
    plain = Scaled(name)
    ours = ORTModule(copy.deepcopy(plain))
    shape = CASES[name][1]
    shapes = [shape, tuple(size + 1 for size in shape)]
    for size in (0, 1, 3):
        shapes += [shape[:axis] + (size,) + shape[axis + 1 :] for axis in (0, len(shape) - 1)]
    for sizes in [*shapes, *shapes]:
        x = torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))
        try:
            expected = results(plain, x)
        except (RuntimeError, IndexError):
            continue  # ours may take it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = results(ours, x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def results(m: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    m.zero_grad()
    x = x.clone().requires_grad_()
    y = m(x)
    y.sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in m.parameters())]
