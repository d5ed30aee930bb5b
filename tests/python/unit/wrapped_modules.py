# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Small modules, plain and wrapped, that the tests of ORTModule compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ortrain import ORTModule


class Net(nn.Module):
    """Two layers with an embedding, a frozen layer and a method of its own."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 5)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None, scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        h = self.dropout(torch.relu(self.norm(self.hidden(self.embed(ids)))).mean(1))
        logits = self.head(h) * scale
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = nn.functional.cross_entropy(logits, labels)
        return out

    def vocabulary(self) -> int:
        return self.embed.num_embeddings


def batch(size: int = 4, length: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 11, (size, length), generator=g),
        "labels": torch.randint(0, 5, (size,), generator=g),
    }


def pair(dropout: float = 0.0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Net(dropout)
    return ORTModule(copy.deepcopy(plain)), plain


def assert_same_gradients(ours: nn.Module, plain: nn.Module) -> None:
    for (name, p), (_, q) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


class Scaled(nn.Module):
    """One weight, and a forward given as a function of (module, x)."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))
        self.register_buffer("b", torch.ones(3))
        self.t = 1.0
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def compare(function: Any, use: Any, x: torch.Tensor, steps: int = 1) -> ORTModule:
    """Run ``use(model, x)`` on both sides; gradients and buffers must agree."""
    plain = Scaled(function)
    ours = ORTModule(copy.deepcopy(plain))
    for _ in range(steps):
        for model in (ours, plain):
            model.zero_grad()
            use(model, x.clone())
        assert_same_gradients(ours, plain)
        torch.testing.assert_close(ours.b, plain.b)
    return ours


# Tensors of types, layouts and devices that the engine does not hold, or not at once.
ODD_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.ones(3, device="meta"),
    "inference": lambda: torch.inference_mode()(torch.ones)(3),
}
