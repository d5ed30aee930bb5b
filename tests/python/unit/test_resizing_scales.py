# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Resizing by scale factors, those among them that keep or double a size: PyTorch's values and gradients."""

import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortrain import ORTModule

_SCALES = (1.1, 2.1, 0.9, 1.05, 2.05, 1.9, 0.5, 2.0, 3.0, 1.37)
_MODES = {
    1: ("nearest", "nearest-exact", "linear", "area"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
    3: ("nearest", "nearest-exact", "trilinear", "area"),
}


class _Resize(nn.Module):
    def __init__(self, calls: list[tuple[str, list[float], bool | None]]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            F.interpolate(image, scale_factor=scales, mode=mode, recompute_scale_factor=again)
            for image, (mode, scales, again) in zip(images, self.calls, strict=True)
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", _MODES)
@pytest.mark.parametrize("seed", range(2))
def test_scales_are_pytorchs(axes: int, seed: int) -> None:
    draw = random.Random(seed)
    calls, images = [], []
    for mode in _MODES[axes] * 3:
        # A factor for each axis; 1.1 and 2.1 times a small size keep and double it.
        calls.append(
            (mode, [draw.choice(_SCALES) for _ in range(axes)], draw.choice([None, True, False]))
        )
        sizes = [draw.randint(2, 12) for _ in range(axes)]
        images.append(torch.randn(1, 3, *sizes, generator=torch.Generator().manual_seed(seed)))
    mine = [image.clone().requires_grad_() for image in images]
    theirs = [image.clone().requires_grad_() for image in images]
    module = _Resize(calls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results, expected = ORTModule(module)(*mine), module(*theirs)
    weights = [torch.linspace(-1, 1, y.numel()).reshape(y.shape) for y in expected]
    torch.autograd.backward(results, weights)
    torch.autograd.backward(expected, weights)
    for call, y, z, a, b in zip(calls, results, expected, mine, theirs, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5, msg=lambda m, c=call: f"{c}: {m}")
        torch.testing.assert_close(
            a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=lambda m, c=call: f"gradient of {c}: {m}"
        )


@pytest.mark.parametrize("scale", [41, 47, 2, 3])
def test_a_whole_scale_of_any_size(scale: int) -> None:
    module = _Resize([("nearest", [float(scale)], None)])
    model = ORTModule(module)
    for size in (3, 5, 7):
        x = torch.randn(1, 2, size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(model(x), module(x))
