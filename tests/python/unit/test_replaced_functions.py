# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions and methods of PyTorch in whose place somebody puts his own while a module is in use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import Linear, assert_same_calls
from torch import nn


class Relu(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.linear(x))


class ReluLayer(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.linear(x))


class Method(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Operator(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2.0


class Norm(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(self.linear(x), dim=1)


def replaced(home: Any, name: str, make: Callable[[Any], Any]) -> Callable[[Any, int], None]:
    """Return what puts a function in the place of another for the third call."""
    before = getattr(home, name)

    def between(net: Any, step: int) -> None:
        setattr(home, name, make(before) if step == 2 else before)

    return between


def times_ten(before: Any) -> Any:
    return lambda *args, **kwargs: before(*args, **kwargs) * 10


def negative(before: Any) -> Any:
    return lambda x, *args, **kwargs: -torch.ops.aten.relu(x)


def _times(factor: int, before: Any, *args: Any, **kwargs: Any) -> Any:
    return before(*args, **kwargs) * factor


def partial_times_ten(before: Any) -> Any:
    return functools.partial(_times, 10, before)


@pytest.mark.parametrize(
    ("kind", "home", "name", "make"),
    [
        (Relu, nn.functional, "relu", times_ten),
        (Relu, nn.functional, "relu", negative),
        (Relu, nn.functional, "relu", partial_times_ten),
        (Relu, nn.functional, "linear", times_ten),
        (ReluLayer, nn.functional, "relu", times_ten),
        (Method, torch.Tensor, "relu", times_ten),
        (Method, torch.Tensor, "relu", negative),
        (Operator, torch.Tensor, "__mul__", lambda before: lambda x, y: before(x, y + 1)),
        (Norm, torch.linalg, "vector_norm", times_ten),
    ],
)
def test_a_replaced_function_counts_once(
    kind: type[Linear], home: Any, name: str, make: Callable[[Any], Any]
) -> None:
    between = replaced(home, name, make)
    own = name in vars(home)
    try:
        assert_same_calls(kind, between)
    finally:
        between(None, 0)
        if not own:
            delattr(home, name)


def test_with_the_original_back_in_place_the_graph_is_used_again() -> None:
    between = replaced(nn.functional, "relu", times_ten)
    model = assert_same_calls(Relu, between)
    records = model.report().captures
    assert [bool(record.fallback) for record in records] == [False, True]
    assert "replaced" in records[1].fallback
