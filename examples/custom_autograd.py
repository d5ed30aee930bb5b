# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""An autograd function inside of a wrapped model: one node of the graph, with its own backward.

Domain adversarial training (Ganin and Lempitsky 2015): the encoder learns digits and unlearns, by a
reversed gradient, whether an image was inverted.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from ortrain import ORTModule


class ReversedGradient(torch.autograd.Function):
    """The identity; the gradient changes its sign."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.strength * gradient, None


class Model(nn.Module):
    """An encoder with a head for digits and an adversary."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128))
        self.digit, self.adversary = nn.Linear(128, 10), nn.Linear(128, 2)

    def forward(self, x: torch.Tensor, digits: torch.Tensor, domains: torch.Tensor) -> Any:
        hidden = self.encoder(x)
        digit = self.digit(hidden)
        domain = self.adversary(ReversedGradient.apply(hidden, 0.3))
        loss = nn.functional.cross_entropy(digit, digits)
        return loss + nn.functional.cross_entropy(domain, domains), digit


images, labels = load_digits(return_X_y=True)
x, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
generator = torch.Generator().manual_seed(0)
domains = torch.randint(2, digits.shape, generator=generator)
x = torch.where(domains[:, None] == 1, 1 - x, x)
order = torch.randperm(len(x), generator=generator)
train, test = order[:1400], order[1400:]

torch.manual_seed(0)
model = ORTModule(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(20):
    for batch in train.split(100):
        optimizer.zero_grad()
        loss, _ = model(x[batch], digits[batch], domains[batch])
        loss.backward()
        optimizer.step()
with torch.no_grad():
    _, scores = model.eval()(x[test], digits[test], domains[test])
print(f"test accuracy {(scores.argmax(-1) == digits[test]).float().mean():.3f}")
print(model.report())
