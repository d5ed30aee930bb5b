# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Adasum against its rule in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from training_runs import make, net, share, weights_of

from ortrain.distributed import Processes, adasum
from ortrain.errors import UnsupportedError

Group = Callable[[int], Ranks]
PARTS = [(0, 5), (5, 6), (16, 300_016)]
SIZE = 300_032


def rule(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the combination of two gradients of a parameter (arXiv:2006.02924)."""
    product = a @ b
    a_square, b_square = a @ a, b @ b
    a_weight = 1 - product / (2 * a_square) if a_square else 1.0
    b_weight = 1 - product / (2 * b_square) if b_square else 1.0
    return a_weight * a + b_weight * b


def combined(vectors: list[np.ndarray]) -> np.ndarray:
    """Return the combination of 2^k vectors: by neighbours, then by pairs, ..."""
    while len(vectors) > 1:
        vectors = [rule(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def vector(rank: int) -> torch.Tensor:
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank))
    if rank == 1:
        values[:5] = 0.0
    return values


def run_reduce() -> torch.Tensor:
    values = vector(dist.get_rank())
    adasum.all_reduce(values, PARTS, Processes())
    return values


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 4])
def test_follows_the_rule(group: Group, size: int) -> None:
    results = group(size).run(run_reduce)
    given = [vector(rank).double().numpy() for rank in range(size)]
    for begin, end in PARTS:
        expected = combined([values[begin:end] for values in given])
        np.testing.assert_allclose(results[0][begin:end].numpy(), expected, rtol=1e-5, atol=1e-5)
    for other in results[1:]:
        for begin, end in PARTS:
            assert torch.equal(other[begin:end], results[0][begin:end])


def test_equal_and_orthogonal_gradients() -> None:
    a = torch.tensor([1.0, 2.0, 3.0])
    same = a.clone()
    adasum.combine(same, a.clone())
    torch.testing.assert_close(same, a)  # the mean
    left, right = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    adasum.combine(left, right)
    torch.testing.assert_close(left, torch.tensor([1.0, 2.0]))  # the sum


def run_train(stage: int) -> dict[str, torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    distributed = {"enable_adasum": True, "deepspeed_zero_optimization": {"stage": stage}}
    trainer = make(size, "sgd", clip=False, distributed=distributed)
    for step in range(3):
        trainer.train_step(*share(step, rank, size))
    return weights_of(trainer)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 4])
def test_training_follows_the_rule(group: Group, size: int) -> None:
    results = group(size).run(run_train, 0)
    torch.manual_seed(1)
    model = net()
    loss = nn.CrossEntropyLoss()
    for step in range(3):
        gradients = []
        for rank in range(size):
            x, label = share(step, rank, size)
            model.zero_grad()
            loss(model(x), label).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        with torch.no_grad():
            for parameter, *of_ranks in zip(model.parameters(), *gradients, strict=True):
                flat = [g.double().numpy().ravel() for g in of_ranks]
                gradient = torch.from_numpy(combined(flat)).float().view_as(parameter)
                parameter -= 0.1 * gradient
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(results[0][name], expected, rtol=1e-5, atol=1e-6)
        for other in results[1:]:
            assert torch.equal(other[name], results[0][name])
    for name, expected in group(size).run(run_train, 1)[0].items():
        assert torch.equal(results[0][name], expected)


def test_needs_a_power_of_two() -> None:
    three = SimpleNamespace(rank=0, size=3)
    with pytest.raises(UnsupportedError, match="world_size is 3, expected a power of two"):
        adasum.all_reduce(torch.zeros(3), [(0, 3)], three)
