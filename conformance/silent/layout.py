# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Strides: channels_last in and out, as_strided, transposed results."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from conformance.silent.program import Session, program

_LAST = torch.channels_last


@program(layout=True)
def channels_last_output(s: Session) -> None:
    """Convolution and normalization of a channels_last image keep its layout."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    model = s.wrap(net.to(memory_format=_LAST))
    for _ in range(3):
        x = s.values(2, 3, 5, 4).to(memory_format=_LAST).requires_grad_()
        y = model(x)
        s.see("output", y)
        s.see("channels last", y.is_contiguous(memory_format=_LAST))
        s.backward(y)
        s.gradients(model, x)


@program("pytorch#183770", 2026, layout=True)
def reflected_padding_of_channels_last(s: Session) -> None:
    """Padding by reflection keeps channels_last."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.pad(x, (2, 1, 1, 2), mode="reflect") * self.scale

    model = s.wrap(Net())
    for _ in range(3):
        s.call(model, s.values(2, 3, 5, 4).to(memory_format=_LAST))


@program("pytorch#174963", 2026)
def as_strided_of_channels_last(s: Session) -> None:
    """as_strided reads memory as it lies, after a roll that keeps the layout."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rolled = torch.roll(x, shifts=-1, dims=0)
            return torch.as_strided(rolled, (5, 10), (4, 1), 0) * self.scale

    model = s.wrap(Net())
    for layout in (_LAST, _LAST, torch.contiguous_format):
        s.call(model, s.values(2, 5, 2, 5).to(memory_format=layout))


@program(layout=True)
def layout_of_the_input_changes(s: Session) -> None:
    """One graph gets contiguous, transposed and channels_last inputs of one shape."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, bool, torch.Tensor]:
            return self.conv(x).relu(), x.is_contiguous(), x * 2

    model = s.wrap(Net())
    image = s.values(2, 4, 4, 4)
    turned = image.transpose(2, 3)
    for x in (image, image, image.to(memory_format=_LAST), turned, image):
        s.train(model, x)


@program(layout=True)
def transposed_results(s: Session) -> None:
    """Results that are transposed, permuted or expanded keep the strides that PyTorch gives them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.linear(x)
            heads = y.view(2, 3, 2, 3).permute(0, 2, 1, 3)
            return y.transpose(1, 2), heads, y.mean(1, keepdim=True).expand(-1, 5, -1)

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(2, 3, 4))


@program()
def view_needs_the_strides(s: Session) -> None:
    """Forward views what it transposed: PyTorch refuses, and so must every other way."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).transpose(0, 1).view(-1)

    model = s.wrap(Net())
    for _ in range(3):
        with s.may_raise("view"):
            s.call(model, s.values(3, 4))


@program()
def caller_views_the_result(s: Session) -> None:
    """The caller takes a flat view of a result, which its strides must allow."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x)

    model = s.wrap(Net())
    for _ in range(3):
        y = model(s.values(2, 3, 6, 6).to(memory_format=_LAST))
        with s.may_raise("flat view"):
            s.see("flat", y.permute(0, 2, 3, 1).view(-1))
