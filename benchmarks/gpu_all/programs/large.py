# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Programs over more than 2^31 elements."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu_all.programs.registry import (
    Seen,
    Wrap,
    gradients_of,
    kind_of,
    large,
)


def _wide(device: str) -> int:
    return (1 << 31) + 4099 if kind_of(device) == "cuda" else 4099


@large
def elements_beyond_31_bits(wrap: Wrap, device: str) -> Seen:
    """Elementwise work, a gather and the sum of a gradient over more than 2^31 elements."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([0.5]))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = F.silu(x * self.scale.to(x.dtype)) + 1
            return y[at], y.narrow(0, y.shape[0] - 1000, 1000).float().sum()

    plain = Wide().to(device)
    model = wrap(plain)
    count = _wide(device)
    x = torch.ones(count, dtype=torch.bfloat16, device=device)
    x[-700:] = 2
    at = torch.tensor([0, count // 2, count - 701, count - 700, count - 1], device=device)
    taken, total = model(x, at)
    (taken.float().sum() + total).backward()
    return gradients_of(plain) | {"taken": taken.detach(), "total": float(total.detach())}


@large
def logits_beyond_31_bits(wrap: Wrap, device: str) -> Seen:
    """A language model's head and loss whose logits have more than 2^31 elements."""
    rows = 44000 if kind_of(device) == "cuda" else 40

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 50257, bias=False)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.norm(x)), labels)

    plain = Head().to(device)
    model = wrap(plain)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 64, generator=generator).to(device)
    labels = torch.randint(0, 50257, (rows,), generator=generator).to(device)
    with torch.autocast(kind_of(device), torch.bfloat16):
        loss = model(x, labels)
    loss.backward()
    return gradients_of(plain, torch.bfloat16) | {"loss": float(loss.detach())}


@large
def images_beyond_31_bits(wrap: Wrap, device: str) -> Seen:
    """Convolutions, a norm and a pool over more than 2^31 elements."""
    rows = 700 if kind_of(device) == "cuda" else 2

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.avg_pool2d(self.norm(self.conv(x)).relu(), 4).square().mean()

    plain = Images().to(device)
    model = wrap(plain)
    side = 448 if kind_of(device) == "cuda" else 16
    one = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)
    x = one * torch.linspace(0.5, 1.5, rows, device=device).view(-1, 1, 1, 1)
    with torch.autocast(kind_of(device), torch.bfloat16):
        loss = model(x)
    loss.backward()
    return gradients_of(plain, torch.bfloat16) | {"loss": float(loss.detach())}
