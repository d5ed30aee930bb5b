# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a program of a user is, how it is registered, and a small network for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Seen = dict[str, Any]


class Wrap:
    """One way to run modules.

    Args:
      make: Makes the module of this way; None for PyTorch alone.

    Attributes:
      ours: Whether it is the engine's.
      made: The modules that were made.
    """

    def __init__(self, make: Callable[[nn.Module], nn.Module] | None = None) -> None:
        self.ours = make is not None
        self.made: list[Any] = []
        self._make = make

    def __call__(self, module: nn.Module) -> Any:
        """Return a module as this way runs it."""
        if self._make is None:
            return module
        self.made.append(self._make(module))
        return self.made[-1]


PROGRAMS: dict[str, Callable[[Wrap, str], Seen]] = {}
_ALONE: set[str] = set()


def program(body: Callable[[Wrap, str], Seen]) -> Callable[[Wrap, str], Seen]:
    """Register a program."""
    PROGRAMS[body.__name__] = body
    return body


def large(body: Callable[[Wrap, str], Seen]) -> Callable[[Wrap, str], Seen]:
    """Register a program that wants the device's memory for itself."""
    _ALONE.add(body.__name__)
    return program(body)


def alone() -> set[str]:
    """Return the names of programs that want the device's memory for themselves."""
    return _ALONE


class Net(nn.Module):
    """A small network with an embedding, a norm, attention and a head."""

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 50)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(F.gelu(y.transpose(1, 2).flatten(2)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.block(self.embedding(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def ids_of(device: str, seed: int = 0, rows: int = 4, length: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (rows, length), generator=generator).to(device)


def weights_of(model: nn.Module, prefix: str = "") -> Seen:
    return {prefix + name: p.detach().clone() for name, p in model.named_parameters()}


def gradients_of(model: nn.Module, computed_in: torch.dtype | None = None) -> Seen:
    """Return copies of the gradients, in the type that they were computed in where it is another."""
    return {
        f"gradient of {name}": p.grad.to(computed_in or p.grad.dtype, copy=True)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def kind_of(device: str) -> str:
    return torch.device(device).type
