# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs a module that somebody changes between its calls, in PyTorch and in Ortrain, and compares."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ortrain import ORTModule


class Linear(nn.Module):
    """A layer of equal weights each time it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-1, 1, 16).reshape(4, 4))
            self.linear.bias.fill_(0.25)


def _run(
    make: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], Any],
    between: Callable[[Any, int], object],
    rows: tuple[int, ...],
) -> tuple[list[Any], Any]:
    torch.manual_seed(3)
    net = make()
    model = wrap(net)
    seen: list[Any] = []
    for step, count in enumerate(rows):
        between(net, step)
        x = torch.linspace(-2, 2, count * 4).reshape(count, 4).requires_grad_()
        net.zero_grad()
        try:
            y = model(x)
            y.sum().backward()
        except RuntimeError as error:
            seen.append(type(error).__name__)
            continue
        seen += [y.detach(), x.grad, *(p.grad for p in net.parameters())]
    return seen, model


def assert_same_calls(
    make: Callable[[], nn.Module],
    between: Callable[[Any, int], object] = lambda net, step: None,
    rows: tuple[int, ...] = (3, 3, 3, 3, 3),
) -> ORTModule:
    """Assert that results and gradients of all calls are PyTorch's.

    Args:
      make: Makes the module, the same each time.
      between: Is called with the module and the number of a call before it.
      rows: Of the argument, for each call.

    Returns:
      The wrapped module.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, _ = _run(make, lambda net: net, between, rows)
        actual, model = _run(make, ORTModule, between, rows)
    assert len(actual) == len(expected)
    for step, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs, msg=lambda text, n=step: f"{n}: {text}")
        else:
            assert mine == theirs
    return model
