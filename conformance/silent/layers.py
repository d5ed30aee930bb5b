# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Layers: pooling, interpolation, normalization with its statistics, attention."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from conformance.silent.program import Session, program


@program("pytorch#100987", 2023)
def average_pooling_with_ceil(s: Session) -> None:
    """Average pooling with ceil_mode divides by what lies in the padded image."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 1)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            y = self.conv(x)
            return [
                F.avg_pool2d(y, 3, stride=2, padding=1, ceil_mode=True),
                F.avg_pool2d(y, 3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
                F.avg_pool2d(y, 2, stride=3, ceil_mode=True, divisor_override=3),
                F.avg_pool1d(y.flatten(2), 5, stride=4, ceil_mode=True),
            ]

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(2, 2, 6, 6))


@program("pytorch#94775", 2023)
def max_pooling_with_ceil(s: Session) -> None:
    """Max pooling with ceil_mode drops windows that begin outside; indices too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 1)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            y = self.conv(x)
            pooled, at = F.max_pool2d(y, 2, stride=2, ceil_mode=True, return_indices=True)
            return [F.max_pool2d(y, 1, stride=(2, 2), ceil_mode=True), pooled, at]

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(1, 1, 6, 7))


@program("pytorch#179931", 2026)
def adaptive_pooling_then_sum(s: Session) -> None:
    """Adaptive average pooling, flattened and summed, with channels no power of two."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(33, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.adaptive_avg_pool2d(x * self.scale, 7).flatten(1).sum(-1)

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(2, 33, 8, 8))


@program("pytorch#143738", 2024)
def pooling_of_integers(s: Session) -> None:
    """Average pooling of the int64 results of argsort."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            order = torch.argsort(x, dim=3)
            return F.avg_pool2d(order, kernel_size=2, stride=2), x * self.scale

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.values(1, 1, 2, 4))


@program("pytorch#185509", 2026)
def interpolate_convolve_pool(s: Session) -> None:
    """Gradients through interpolation by uneven factors, a crop, convolution, pooling and where."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3, padding=1)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)
            y = self.conv(y[:, :, 1:7, 1:8])
            return torch.where(mask, y, F.max_pool2d(y, 3, stride=1, padding=1))

    model = s.wrap(Net())
    mask = (torch.arange(42).reshape(6, 7) % 3 == 0).expand(2, 3, 6, 7)
    for _ in range(3):
        s.train(model, s.leaf(2, 2, 6, 8), mask)


@program()
def interpolation_of_every_kind(s: Session) -> None:
    """Interpolation by size and by factor, aligned and not, kept factors, up and down."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            x = x * self.scale
            return [
                F.interpolate(x, size=(7, 3), mode="nearest"),
                F.interpolate(x, size=(7, 3), mode="nearest-exact"),
                F.interpolate(x, scale_factor=1.7, mode="bilinear"),
                F.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
                F.interpolate(x, size=(3, 9), mode="bilinear", align_corners=True),
                F.interpolate(x, size=(8, 8), mode="bicubic"),
                F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True),
                F.interpolate(x, size=(3, 2), mode="area"),
            ]

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(1, 2, 5, 5))


@program("pytorch#193061", 2026)
def modulated_norms_share_a_table(s: Session) -> None:
    """Chained layer norms are modulated by slices of one learnt table."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(s.values(6, 16))
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            a, b, c, d, e, f = (self.table + shift.unsqueeze(1)).unbind(1)
            y = F.layer_norm(x, (16,)) * (1 + a.unsqueeze(1)) + b.unsqueeze(1)
            x = x + c.unsqueeze(1) * self.linear(y)
            y = F.layer_norm(x, (16,)) * (1 + d.unsqueeze(1)) + e.unsqueeze(1)
            return x + f.unsqueeze(1) * y

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(2, 5, 16), s.leaf(2, 16))


@program("pytorch#194504", 2026)
def batch_norm_with_a_cumulative_mean(s: Session) -> None:
    """Batch norm without momentum: statistics are means over all batches, counted in a buffer."""
    model = s.wrap(nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)))
    for step in range(5):
        s.train(model, s.leaf(6, 4) * (step + 1))
    model.eval()
    s.train(model, s.leaf(6, 4))


@program()
def batch_norm_options_change(s: Session) -> None:
    """Momentum and epsilon change, statistics are reset, tracking is switched off."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    net = Net()
    model = s.wrap(net)
    for step in range(6):
        if step == 2:
            net.norm.momentum = 0.5
        elif step == 3:
            net.norm.eps = 0.1
        elif step == 4:
            net.norm.reset_running_stats()
        elif step == 5:
            net.norm.track_running_stats = False
            net.norm.running_mean = net.norm.running_var = None
        s.train(model, s.leaf(6, 4) + step)


@program()
def masked_rows_of_attention(s: Session) -> None:
    """Rows that may see no key: zeros or NaN, by which function is called; gradients too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> list[torch.Tensor]:
            q = self.query(x)
            bias = torch.zeros(seen.shape).masked_fill(~seen, -float("inf"))
            scores = (q @ x.transpose(-1, -2)).masked_fill(~seen, -float("inf"))
            return [
                F.scaled_dot_product_attention(q, x, x, attn_mask=seen),
                F.scaled_dot_product_attention(q, x, x, attn_mask=bias),
                F.scaled_dot_product_attention(q, x, x, is_causal=True),
                scores.softmax(-1),
            ]

    model = s.wrap(Net())
    seen = torch.ones(2, 3, 3, dtype=torch.bool).tril()
    empty = seen.clone()
    empty[0, 1] = False
    for mask in (seen, seen, empty, seen):
        outputs = model(s.values(2, 3, 4), mask)
        s.see("outputs", outputs)
        outputs[2].sum().backward(retain_graph=True)
        s.gradients(model)


@program()
def losses_with_ignored_targets(s: Session) -> None:
    """Cross entropy with ignored targets, all ignored, weights, smoothing and probabilities."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
            z, weight = self.linear(x), torch.tensor([1.0, 2.0, 0.5])
            return [
                F.cross_entropy(z, y),
                F.cross_entropy(z, y, weight=weight, label_smoothing=0.1),
                F.cross_entropy(z, y, reduction="none"),
                F.nll_loss(z.log_softmax(-1), y, weight=weight, reduction="sum"),
                F.cross_entropy(z, z.detach().softmax(-1)),
            ]

    model = s.wrap(Net())
    for y in ([0, 2, -100], [1, -100, 2], [-100, -100, -100], [0, 1, 2]):
        s.train(model, s.leaf(3, 4), torch.tensor(y))


@program()
def recurrent_state_kept(s: Session) -> None:
    """A recurrent layer's state is kept in an attribute, detached between calls, then reset."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 3)
            self.state: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = self.cell(x, self.state)
            self.state = state.detach()
            return state

    net = Net()
    model = s.wrap(net)
    for step in range(5):
        if step == 3:
            net.state = None
        s.train(model, s.leaf(2, 4) + step)
        s.see("state", net.state)


@program()
def spectral_and_weight_norm(s: Session) -> None:
    """Parametrizations: spectral norm updates its vectors in training, weight norm has a gain."""
    torch.manual_seed(3)
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    second = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
    model = s.wrap(nn.Sequential(first, nn.Tanh(), second))
    for _ in range(4):
        s.train(model, s.leaf(3, 4))
    model.eval()
    s.train(model, s.leaf(3, 4))
