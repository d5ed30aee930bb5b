# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Positions: scatter and its gradients, arg-reductions of transposed tensors, indices out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from conformance.silent.program import Session, program


class Apply(nn.Module):
    """Applies a function to its inputs and a parameter of their last extent."""

    def __init__(self, function: Callable[..., Any], weight: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(weight)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return what the function returns of the parameter and the inputs."""
        return self.function(self.weight, *inputs)


def _train(
    s: Session, function: Callable[..., Any], weight: torch.Tensor, *inputs: torch.Tensor
) -> None:
    model = s.wrap(Apply(function, weight))
    for _ in range(3):
        s.train(model, *inputs)


@program("pytorch#183602", 2026)
def diagonal_scatter_gradient(s: Session) -> None:
    """The diagonal is overwritten: the gradient of the rest goes through."""
    _train(s, lambda w, d: torch.diagonal_scatter(w, d, 0).sum(), s.values(5, 5), s.leaf(5))
    _train(s, lambda w, d: torch.diagonal_scatter(w, d, 1).cos(), s.values(5, 5), s.leaf(4))


@program("pytorch#180164", 2026)
def slice_scatter_then_sum(s: Session) -> None:
    """slice_scatter along the dimension that is summed afterwards."""

    def compute(w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.slice_scatter(w, y, dim=2, start=1, end=4).sum(2)

    _train(s, compute, s.values(2, 3, 6), s.leaf(2, 3, 3))


@program("pytorch#180771", 2026)
def slice_scatter_gradient(s: Session) -> None:
    """The slice is overwritten at the begin, in the middle and with steps."""

    def compute(w: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.slice_scatter(w, y, dim=0, start=0, end=2).sum(),
            torch.slice_scatter(w, y, dim=0, start=1, end=3).sum(),
            torch.slice_scatter(w, y, dim=0, start=0, end=4, step=2),
            torch.select_scatter(w, y.sum(), 0, -1),
        ]

    _train(s, compute, s.values(5), s.leaf(2))


@program("pytorch#183082", 2026)
def argmax_of_a_transposed_result(s: Session) -> None:
    """argmax over all elements of the transpose of what was changed in place."""

    def compute(w: torch.Tensor) -> list[torch.Tensor]:
        y = w.detach().clone()
        y.sin_()
        return [y.t().argmax(), y.t().argmin(), y.argmax(), y.t().contiguous().argmax(0), w * 2]

    _train(s, compute, s.values(5, 7) * 3)


@program("pytorch#178964", 2026)
def max_of_a_sum_with_a_transpose(s: Session) -> None:
    """Values and indices of max over a dimension of a sum of differently strided operands."""

    def compute(w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        found = (w.t() + b).max(dim=1)
        lowest = (w.t() - b).min(dim=0)
        return [found.values, found.indices, lowest.values, lowest.indices]

    _train(s, compute, s.values(8, 8), s.values(8, 8).flip(0).cos())


@program("pytorch#174459", 2026)
def stable_orders(s: Session) -> None:
    """Stable sort, argsort and topk among equal values."""
    keys = torch.tensor([[2, 1, 2, 1, 1, 2], [1, 1, 1, 2, 2, 2]])

    def compute(w: torch.Tensor, keys: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.sort(keys, stable=True, dim=-1, descending=True).indices,
            torch.argsort(keys, dim=-1, stable=True),
            keys.topk(3).values,
            w[torch.argsort(keys[0], stable=True)],
        ]

    _train(s, compute, s.values(6), keys)


@program("pytorch#185702", 2026)
def slice_through_special_functions(s: Session) -> None:
    """One slice of a larger tensor goes through softplus, lgamma, erf and xlogy into a stack."""

    def compute(w: torch.Tensor, wide: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = wide[..., 3]
        positive = nn.functional.softplus(x) + 1e-4
        rates = nn.functional.softplus(y) + 1e-4
        a = torch.special.gammaln(positive + w.abs())
        b = torch.special.erf(x * w)
        return torch.stack((a, b, torch.special.xlogy(positive, rates)), -1)

    _train(s, compute, s.values(8), s.leaf(4, 8, 6), s.leaf(4, 8))


@program()
def indices_out_of_range(s: Session) -> None:
    """Embedding, gather and indexing refuse positions out of range, and go on afterwards."""

    def compute(w: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        return [nn.functional.embedding(ids, w), w[ids]]

    model = s.wrap(Apply(compute, s.values(5, 3)))
    for last in (4, 4, 5, 4):
        with s.may_raise(f"position {last}"):
            s.train(model, torch.tensor([0, last]))


@program()
def negative_indices_and_masks(s: Session) -> None:
    """Negative positions, boolean masks, slices with steps, None and Ellipsis in one expression."""

    def compute(w: torch.Tensor, at: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        return [
            w[at, None, ..., ::2],
            w[mask],
            w[:, at],
            w[at[:, None], at],
            w.take(at * 2),
            torch.where(mask, w, w.flip(0)),
            w.masked_fill(mask, -1.0).cumsum(0),
        ]

    mask = torch.arange(16).reshape(4, 4) % 3 == 0
    _train(s, compute, s.values(4, 4), torch.tensor([-1, 0, -2]), mask)
    _train(s, compute, s.values(4, 4), torch.tensor([-1, 0, -2]), ~mask)


@program()
def scatter_reduce_of_every_kind(s: Session) -> None:
    """scatter_reduce by sum, product, mean and maximum, with and without what was there."""
    at = torch.tensor([0, 1, 0, 3, 1, 0])

    def compute(w: torch.Tensor, at: torch.Tensor) -> list[torch.Tensor]:
        base = torch.full((4,), 0.5)
        return [
            base.scatter_reduce(0, at, w, reduce, include_self=own)
            for reduce in ("sum", "prod", "mean", "amax", "amin")
            for own in (True, False)
        ]

    _train(s, compute, s.values(6), at)


@program()
def empty_and_single(s: Session) -> None:
    """Batches of no rows and of one row through what was captured for three."""

    def compute(w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        y = x * w
        return [y, y.sum(0), y.mean(), y.softmax(0), torch.cat((y, y)), y[:1], y.flatten()]

    model = s.wrap(Apply(compute, s.values(4)))
    for rows in (3, 3, 1, 0, 3, 2):
        s.train(model, s.values(rows, 4))
