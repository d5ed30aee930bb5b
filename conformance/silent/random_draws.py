# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Random numbers in forward: Python's, NumPy's, and PyTorch's under a fixed seed.

Masks of dropout are left out: an engine may draw those as it likes.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from conformance.silent.parts import Linear
from conformance.silent.program import Session, program


def _steps(s: Session, net: nn.Module, steps: int = 5) -> None:
    """Train, seeding PyTorch before each step; show what the next draw would be at the end."""
    model = s.wrap(net)
    for step in range(steps):
        s.seed(step // 2)
        s.train(model, s.leaf(3, 4) + step)
    s.see("next draws", [torch.rand(()), random.random(), float(np.random.rand())])


@program()
def layers_dropped_by_random(s: Session) -> None:
    """LayerDrop: Python's random decides for each layer whether it runs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if random.random() > 0.5:
                    x = x + layer(x).tanh()
            return x

    _steps(s, Net(), 6)


@program()
def spans_masked_by_numpy(s: Session) -> None:
    """SpecAugment: NumPy draws where masked spans begin; forward fills them with a parameter."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.masked = nn.Parameter(s.values(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = np.zeros(x.shape[:2], dtype=bool)
            for row in range(x.shape[0]):
                start = np.random.randint(0, x.shape[1] - 2)
                mask[row, start : start + 2] = True
            x = x.clone()
            x[torch.from_numpy(mask)] = self.masked
            return self.linear(x)

    model = s.wrap(Net())
    for step in range(5):
        s.seed(step // 2)
        s.train(model, s.leaf(2, 8, 4))
    s.see("next draw", float(np.random.rand()))


@program()
def generator_objects_of_python_and_numpy(s: Session) -> None:
    """random.Random and numpy's Generator, held by the module, draw scales and shifts."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.random = random.Random(3)
            self.generator = np.random.default_rng(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.random.uniform(1, 2) + self.generator.normal()

    net = Net()
    model = s.wrap(net)
    for _ in range(4):
        s.train(model, s.leaf(3, 4))
    s.see("next draws", [net.random.random(), float(net.generator.random())])


@program()
def generator_of_torch(s: Session) -> None:
    """A torch.Generator of the module's draws noise; its state goes on from call to call."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + torch.randn(x.shape, generator=self.generator)

    net = Net()
    model = s.wrap(net)
    for _ in range(4):
        s.train(model, s.leaf(3, 4))
    s.see("next draw", torch.rand((), generator=net.generator))


@program()
def draws_of_every_kind(s: Session) -> None:
    """randn, rand_like, randint, randperm and normal_ under one seed, in the order of the program."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x) + torch.randn(x.shape)
            y = y * torch.rand_like(y)
            y = y + torch.randint(0, 5, (4,)) + torch.randn_like(y)
            y = y[:, torch.randperm(4)]
            return y + torch.empty(4).normal_(1.0, 2.0) + torch.empty(4).uniform_(-1, 1)

    _steps(s, Net())


@program("pytorch#188074", 2026)
def spikes_by_bernoulli(s: Session) -> None:
    """A spiking layer: potentials are kept between calls, spikes are drawn by bernoulli."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("potential", torch.zeros(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rate = (self.potential * 0.9 + self.linear(x)).sigmoid()
            spikes = torch.bernoulli(rate.detach())
            self.potential = (rate * (1 - spikes)).detach()
            return spikes + rate - rate.detach()

    _steps(s, Net())


@program("pytorch#192635", 2026)
def draws_of_two_branches(s: Session) -> None:
    """Two independent branches draw; the order of the program says which draws first."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(64, 64), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
            a = self.large(wide)
            a = (a * (torch.rand_like(a) < 0.8)).mean()
            b = self.small(x)
            return b * (torch.rand_like(b) < 0.8) + a

    model = s.wrap(Net())
    for step in range(3):
        s.seed(step)
        s.train(model, s.leaf(3, 4), s.leaf(16, 64))


@program()
def samples_by_multinomial_and_gumbel(s: Session) -> None:
    """Straight-through Gumbel softmax, and a sample by multinomial that gathers log probabilities."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.linear(x)
            hard = F.gumbel_softmax(logits, tau=0.7, hard=True)
            drawn = torch.multinomial(logits.softmax(-1), 2)
            chosen = logits.log_softmax(-1).gather(-1, drawn)
            return hard @ x.detach().t() + x.sum(), chosen

    _steps(s, Net())


@program()
def distributions(s: Session) -> None:
    """torch.distributions: reparametrized normal samples and categorical ones."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x)
            sample = torch.distributions.Normal(y, y.exp().clamp(max=2)).rsample()
            kind = torch.distributions.Categorical(logits=y)
            action = kind.sample()
            return sample, kind.log_prob(action)

    _steps(s, Net())


@program("pytorch#151525", 2025)
def weight_drawn_in_forward(s: Session) -> None:
    """A lazy transposed convolution, then a linear map by a matrix that forward draws, then argmax."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.LazyConvTranspose2d(out_channels=4, kernel_size=3, stride=2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.up(x).flatten(1)
            z = F.linear(y, torch.randn(8, y.shape[1], dtype=x.dtype))
            return z, z.argmax(1)

    model = s.wrap(Net())
    for step in range(3):
        s.seed(step)
        s.train(model, s.leaf(2, 3, 5, 5))


@program()
def seed_set_in_forward(s: Session) -> None:
    """Forward seeds PyTorch's generator itself and restores the state that it found."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = torch.get_rng_state()
            torch.manual_seed(11)
            noise = torch.randn(4)
            torch.set_rng_state(before)
            return self.linear(x) + noise + torch.rand(4)

    _steps(s, Net())


@program("pytorch#183249", 2026)
def fractional_pooling_draws(s: Session) -> None:
    """Fractional max pooling draws where its windows lie."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.fractional_max_pool2d(self.conv(x), 2, output_ratio=(0.6, 0.6))

    model = s.wrap(Net())
    for step in range(3):
        s.seed(step)
        s.train(model, s.leaf(2, 2, 9, 9))
    s.see("next draw", torch.rand(()))


@program("pytorch#185246", 2026)
def refused_probabilities(s: Session) -> None:
    """bernoulli refuses probabilities above 1, and takes good ones afterwards."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, p: torch.Tensor) -> torch.Tensor:
            return torch.bernoulli(p) * self.scale

    model = s.wrap(Net())
    good, bad = torch.full((4,), 0.5), torch.full((4,), 1.5)
    for p in (good, good, bad, good):
        s.seed(1)
        with s.may_raise("bernoulli"):
            s.call(model, p)


@program("pytorch#158643", 2025)
def dropout_in_evaluation(s: Session) -> None:
    """Dropout and in-place ReLU in evaluation mode, where nothing may be drawn."""
    net = nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(8, 4),
        nn.ReLU(inplace=True),
    )
    model = s.wrap(net.eval())
    for step in range(3):
        s.train(model, s.leaf(3, 4) + step)
        s.see("next draw", torch.rand(()))
