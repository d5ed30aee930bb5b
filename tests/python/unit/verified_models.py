# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Models that run under ORTModule(verify=...)."""

import torch
import torch.nn.functional as F
from torch import nn

from ortrain import ORTModule


class Block(nn.Module):
    """A layer with dropout, normalization and an activation that tests plant errors into."""

    def __init__(self, activation=torch.tanh):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.dropout, self.activation = nn.Dropout(0.25), activation

    def forward(self, x):
        return self.dropout(self.activation(self.norm(self.linear(x))))


class Model(nn.Module):
    """Returns a loss and scores; the second block is the one whose activation differs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(torch.relu), Block(torch.tanh), Block(torch.relu)])
        self.head = nn.Linear(6, 3)

    def forward(self, x, labels=None):
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        loss = F.cross_entropy(scores, labels) if labels is not None else scores.square().mean()
        return {"loss": loss, "scores": scores}


def batch(size=5):
    return torch.randn(size, 6), torch.randint(0, 3, (size,))


def wrapped(verify, make=Model):
    torch.manual_seed(0)
    return ORTModule(make(), verify=verify)


class Counting(nn.Module):
    """Counts in an attribute, prints nothing, and breaks the graph at a number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.seen = []

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if float(x.detach().sum()) > 1e9:
            x = -x
        self.seen.append(len(self.seen))
        return self.second(x)
