# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's backward runs its function again, and finds what has been written since: as in PyTorch."""

import copy
import functools
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule

WIDTH = 6
once = functools.partial(checkpoint, use_reentrant=False)


class Net(nn.Module):
    """Layers, a buffer `table`, and statistics of a norm that is called as a function."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.gains = nn.ParameterList(nn.Parameter(torch.rand(width)) for _ in range(3))
        self.register_buffer("table", torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.calls = 0
        self.run = checkpoint

    def inside(self, x):
        return torch.tanh(self.first(x) * self.table)


class WrittenBehind(Net):
    def forward(self, x):
        h = once(self.inside, x)
        with torch.no_grad():
            self.table.lerp_(h.mean(0), 0.5)
        return self.last(h)


class WrittenByAView(Net):
    def forward(self, x):
        h = once(self.inside, x)
        self.table[:2].mul_(1.5)
        return self.last(h)


class WrittenTwice(Net):
    def forward(self, x):
        self.table.mul_(0.9)
        h = once(self.inside, x)
        self.table.add_(0.5)
        return self.last(h)


class ReadInNested(Net):
    def forward(self, x):
        h = once(lambda y: once(self.inside, y).cos(), x)
        self.table.add_(0.5)
        return self.last(h)


class StatisticsBehind(Net):
    def forward(self, x):
        h = once(lambda y: torch.tanh(self.first(y) - self.norm.running_mean), x)
        return self.last(self.norm(h)).exp()


class StatisticsOfAFunction(Net):
    def forward(self, x):
        h = once(lambda y: torch.tanh(self.first(y) - self.mean), x)
        h = functional.batch_norm(h, self.mean, self.variance, training=True)
        return self.last(h)


class StatisticsInside(Net):
    def forward(self, x):
        def normed(y):
            return functional.batch_norm(self.first(y), self.mean, self.variance, training=True)

        return self.last(once(normed, x).sin())


class ArgumentWritten(Net):
    def forward(self, x):
        y = self.first(x)
        h = once(lambda z: torch.tanh(z) * z.detach(), y.detach() * self.gains[0])
        z = x.clone()
        w = once(lambda a: torch.tanh(self.first(a)) * z, x)
        z.mul_(2)
        return self.last(h + w)


class LateName(Net):
    def forward(self, x):
        for gain in self.gains:
            x = once(lambda y: torch.tanh(self.first(y) * gain), x)  # noqa: B023
        return x


class LateNumber(Net):
    def forward(self, x):
        scale = 1.0
        x = once(lambda y: torch.tanh(self.first(y) * scale), x)
        scale = 3.0
        return x * scale


class LateList(Net):
    def forward(self, x):
        gains = [self.gains[0]]
        x = once(lambda y: torch.tanh(self.first(y) * sum(gains)), x)
        gains.append(self.gains[1])
        return self.last(x)


class LateAttribute(Net):
    def forward(self, x):
        for self.calls in range(3):
            x = once(lambda y: torch.tanh(self.first(y) * self.gains[self.calls]), x)
        return x


class LateItem(Net):
    def forward(self, x):
        LATE["scale"] = 1.0
        h = once(lambda y: torch.tanh(self.first(y) * LATE["scale"]), x)
        LATE["scale"] = 3.0
        return self.last(h)


class LateObject(Net):
    def forward(self, x):
        held = types.SimpleNamespace(scale=1.0)
        h = once(lambda y: torch.tanh(self.first(y) * held.scale), x)
        held.scale = 3.0
        return self.last(h)


class GoesOn(Net):
    def forward(self, x):
        scales = iter([1.0, 2.0, 3.0])
        return self.last(once(lambda y: torch.tanh(self.first(y) * next(scales)), x))


LATE = {"scale": 0.0}


class InPieces(Net):
    def forward(self, x):
        self.calls += 1
        h = self.run(self.inside, x, use_reentrant=False)
        self.table.mul_(1.5)
        return self.last(h)


class InPiecesByModule(Net):
    def forward(self, x):
        self.calls += 1
        h = checkpoints.checkpoint(self.inside, self.last(x), use_reentrant=True)
        self.table.mul_(1.5)
        return self.last(h)


class NormReentrant(Net):
    def forward(self, x):
        return checkpoint(lambda y: self.last(self.norm(y)), self.first(x), use_reentrant=True)


class NormReentrantByAnotherName(Net):
    def forward(self, x):
        return self.run(lambda y: self.last(self.norm(y)), self.first(x), use_reentrant=True)


def steps_of(module, width):
    """Return losses, gradients and buffers of three steps."""
    found = []
    for step in range(3):
        module.zero_grad(set_to_none=True)
        x = torch.randn(16, width, generator=torch.Generator().manual_seed(step)) * 2 + 1
        loss = module(x.double()).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]
        found += [b.clone() for b in module.buffers()]
    return found


@pytest.mark.parametrize(
    "kind",
    [
        *(WrittenBehind, WrittenByAView, WrittenTwice, ReadInNested, StatisticsBehind),
        *(StatisticsOfAFunction, StatisticsInside, ArgumentWritten, LateName, LateNumber, LateList),
        *(
            LateAttribute,
            LateItem,
            LateObject,
            GoesOn,
            InPieces,
            InPiecesByModule,
            NormReentrant,
            NormReentrantByAnotherName,
        ),
    ],
)
@pytest.mark.parametrize("width", [WIDTH, 256])
def test_what_was_written_since_is_read_as_in_pytorch(kind, width):
    torch.manual_seed(0)
    plain = kind(width).double()
    ours = ORTModule(copy.deepcopy(plain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = steps_of(ours, width)
    torch.testing.assert_close(found, steps_of(plain, width), rtol=1e-9, atol=1e-11)


class Apart(Net):
    """Writes to what no checkpoint reads, and gives names back what they had."""

    def scaled(self, x):
        return x * 1.5

    def forward(self, x):
        for layer in (self.first, self.last):
            shape, pair, act = x.shape, (2, 3), self.scaled
            rows, width = shape
            x = once(
                lambda y, of=layer: act(of(y)).reshape(rows, width).view(shape) * pair[0],  # noqa: B023
                x,
            )
        with torch.no_grad():
            self.table.mul_(0.9)
        scale = 2.0
        h = once(lambda y: self.inside(y) * scale, x)
        scale = 1.0 + 1.0
        h = self.norm(h)
        h = once(lambda y: torch.tanh(y) * y.shape[0], h)
        return self.last(h)


def test_large_and_deep_containers_are_no_obstacle():
    table, deep = dict.fromkeys(range(50_000), 1.0), []
    for _ in range(2000):
        deep = [deep]

    class Holds(Net):
        def forward(self, x):
            for _ in range(8):
                x = once(lambda y: self.inside(y) * table[7] + len(deep), x)
            return x

    plain = Holds().double()
    ours = ORTModule(copy.deepcopy(plain))
    torch.testing.assert_close(steps_of(ours, WIDTH), steps_of(plain, WIDTH), rtol=1e-9, atol=1e-11)
    assert not ours.report().captures[-1].fallback


def test_what_no_checkpoint_reads_may_be_written():
    torch.manual_seed(0)
    plain = Apart().double()
    ours = ORTModule(copy.deepcopy(plain))
    torch.testing.assert_close(steps_of(ours, WIDTH), steps_of(plain, WIDTH), rtol=1e-9, atol=1e-11)
    assert not ours.report().captures[-1].fallback
