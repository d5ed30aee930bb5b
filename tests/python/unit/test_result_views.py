# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Results that are inputs, share memory, or lie in it otherwise than row after row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ortrain import ORTModule


class Returns(nn.Module):
    """Returns what a function makes of itself, its argument and its layer's result."""

    def __init__(self, results: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("buffer", torch.ones(4))
        self.results = results

    def forward(self, x: torch.Tensor) -> Any:
        return self.results(self, x, self.layer(x))


RESULTS: dict[str, Callable[..., Any]] = {
    "argument": lambda m, x, y: (y, x),
    "view of the argument": lambda m, x, y: (y, x.view(-1), x[1], x.t()),
    "parameter": lambda m, x, y: (y, m.layer.weight, m.layer.weight.t(), m.buffer[1:]),
    "views of a result": lambda m, x, y: (y, y.view(-1), y[:, 1:3], y),
    "views without the result": lambda m, x, y: (y.view(-1), y[:, :2]),
    "parts": lambda m, x, y: y.chunk(2, dim=1),
    "detached": lambda m, x, y: (y, y.detach()),
    "transposed": lambda m, x, y: y.t(),
    "expanded": lambda m, x, y: y.expand(2, *y.shape),
    "strided": lambda m, x, y: (y * 2)[::2, 1:],
    "sizes in the view": lambda m, x, y: (y, y.reshape(x.shape[0] * 2, x.shape[1] // 2)),
    "same view": lambda m, x, y: y.view(y.shape),
}


def places(result: Any, model: nn.Module, x: torch.Tensor) -> list[Any]:
    """Describe where each tensor of a result lies: whose memory, and how."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    named = {"x": x, **dict(model.named_parameters()), **dict(model.named_buffers())}
    known = {t.untyped_storage().data_ptr(): name for name, t in named.items()}
    described = []
    for i, leaf in enumerate(leaves):
        memory = known.setdefault(leaf.untyped_storage().data_ptr(), f"result {i}")
        same = [name for name, t in named.items() if t is leaf]
        same += [f"result {j}" for j in range(i) if leaves[j] is leaf]
        described.append((memory, same, leaf.stride(), leaf.storage_offset(), leaf.requires_grad))
    return described


@pytest.mark.parametrize("name", RESULTS)
def test_results_share_memory_as_in_pytorch(name: str) -> None:
    model = Returns(RESULTS[name])
    wrapped = ORTModule(model)
    for rows in (3, 3, 5):
        x = torch.randn(rows, 4, requires_grad=True)
        expected, found = model(x), wrapped(x)
        assert places(found, model, x) == places(expected, model, x)
        torch.testing.assert_close(found, expected)
        gradients = []
        for result in (expected, found):
            model.zero_grad()
            x.grad = None
            leaves = [t for t in pytree.tree_leaves(result) if t.requires_grad]
            sum((t * torch.arange(t.numel()).reshape(t.shape)).sum() for t in leaves).backward()
            gradients.append([x.grad, model.layer.weight.grad, model.layer.bias.grad])
        for found_gradient, expected_gradient in zip(*gradients, strict=True):
            torch.testing.assert_close(found_gradient, expected_gradient)
    assert wrapped.report().native_share == 1.0


def test_writes_are_seen_through_all_views() -> None:
    model = Returns(lambda m, x, y: (y, y.view(-1), x[0]))
    wrapped = ORTModule(model)
    x = torch.randn(3, 4)
    with torch.no_grad():
        whole, flat, row = wrapped(x)
        flat[0], row[1] = 7.0, 9.0
    assert whole[0, 0] == 7.0 and x[0, 1] == 9.0


def test_an_argument_that_is_written_and_returned() -> None:
    model = Returns(lambda m, x, y: (x.add_(1), x.view(-1), y.detach() * 1))
    wrapped = ORTModule(model)
    x = torch.randn(3, 4)
    before = x.clone()
    with torch.no_grad():
        written, flat, _ = wrapped(x)
    assert written is x and flat.data_ptr() == x.data_ptr()
    torch.testing.assert_close(x, before + 1)


@pytest.mark.parametrize("where", ["argument", "weights", "both"])
def test_channels_last_stays(where: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    if where != "argument":
        model.to(memory_format=torch.channels_last)
    wrapped = ORTModule(model)
    for size in (6, 6, 8):
        x = torch.randn(2, 3, size, 7)
        if where != "weights":
            x = x.to(memory_format=torch.channels_last)
        expected, found = model(x), wrapped(x)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)
    assert wrapped.report().native_share == 1.0


def test_the_order_of_axes_of_an_argument_counts() -> None:
    model = Returns(lambda m, x, y: x.view(-1) * 2 + y.sum())
    wrapped = ORTModule(model)
    square = torch.randn(4, 4)
    torch.testing.assert_close(wrapped(square), model(square))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        wrapped(square.t())


def test_containers_stay_where_they_are() -> None:
    model = Returns(lambda m, x, y: y * m.shared["scale"][0])
    shared = model.shared = {"scale": [2.0]}
    wrapped = ORTModule(model)
    x = torch.randn(2, 4)
    wrapped(x)
    assert model.shared is shared
    shared["scale"][0] = 3.0
    torch.testing.assert_close(wrapped(x), model(x))
