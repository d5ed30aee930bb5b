# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Slices that end outside of some tensors and inside of others: one graph with a formula for their length."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from ortrain import ORTModule
from ortrain.capture import size_internals
from ortrain.capture.slice_sizes import by_our_rule, slices_have_formulas

_SIZES = range(2, 12)
_BOUNDS = (None, 0, 1, 5, -1, -5, 10**6, -(10**6))


_RULES = pytest.mark.parametrize("rule", [slices_have_formulas, by_our_rule])


def _length(rule: Any, start: int | None, end: int | None, step: int) -> tuple[Any, int]:
    """Return what a traced slice along an axis is long, and the guards that it has made."""
    shapes = ShapeEnv()
    with size_internals.flexible_sizes(), rule():
        mode = FakeTensorMode(shape_env=shapes)
        x = mode.from_tensor(torch.empty(3, 7))
        with mode:
            sliced = torch.ops.aten.slice.Tensor(x, -1, start, end, step)
    assert sliced.shape[0] == x.shape[0]
    return sliced.shape[1], len(shapes.guards)


@pytest.mark.sampled(12)
@_RULES
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("start", _BOUNDS)
def test_a_length_is_that_of_python_at_every_size(rule: Any, start: int | None, step: int) -> None:
    for end in _BOUNDS:
        length, guards = _length(rule, start, end, step)
        formula = size_internals.size_expression(length)
        assert not free_unbacked_symbols(length)
        assert guards == 0
        symbols = [] if isinstance(formula, int) else sorted(formula.free_symbols, key=str)
        value = size_internals.size_function(formula, symbols)
        for size in _SIZES:
            expected = len(range(*slice(start, end, step).indices(size)))
            assert value(*[size] * len(symbols)) == expected, (start, end, size)


@_RULES
def test_a_slice_that_pytorch_refuses_is_refused(rule: Any) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with rule(), mode:
        x = torch.empty(3, 7)
        with pytest.raises(RuntimeError, match="step must be positive"):
            torch.ops.aten.slice.Tensor(x, 1, 0, 5, 0)
        with pytest.raises(IndexError):
            torch.ops.aten.slice.Tensor(x, 2, 0, 5)
        with pytest.raises(RuntimeError, match="0-dim"):
            torch.ops.aten.slice.Tensor(x.sum(), 0, 0, 5)


class Call(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x, 2 * x[:, :5]], 1),
        lambda x: x[:, 3:-2:2] * 2,
        lambda x: x[:, -4:] + 1,
        lambda x: x[x.shape[0] :] * 2,
        lambda x: torch.arange(8.0)[: x.shape[1]].sum() * x,
    ],
    ids=["cat", "strided", "from the end", "from a size", "to a size"],
)
def test_one_graph_for_slices_of_all_sizes(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    ours, plain = ORTModule(Call(function)), Call(function)
    for size in (19, 7, 4):
        results = []
        for module in (ours, plain):
            x = torch.arange(3.0 * size).view(3, size).requires_grad_()
            y = module(x)
            y.square().sum().backward()
            results.append((y, x.grad))
        (y, gradient), (expected, expected_gradient) = results
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(gradient, expected_gradient)
    report = ours.report()
    assert [c.fallback for c in report.captures] == [""]
    assert report.native_share == 1.0
