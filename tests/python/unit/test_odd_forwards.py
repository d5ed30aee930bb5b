# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules whose forward is no function of Python, and arguments whose elements share memory with others."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.l(x))


class _Bound:
    def __get__(self, owner: Any, kind: type | None = None) -> Callable[..., torch.Tensor]:
        return functools.partial(self, owner)

    def __call__(self, owner: Any, x: torch.Tensor) -> torch.Tensor:
        return owner.l(x) * 4


class _OfObject(_Net):
    forward = _Bound()  # type: ignore[assignment]


class _WritesRows(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[0].add_(1)
        x[1] = 5.0
        return self.l(x)


class _WritesOne(_Net):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return self.l(a) + self.k(b) * 2


def _assert_same_calls(net: nn.Module, *calls: Callable[[], tuple[torch.Tensor, ...]]) -> None:
    seen = []
    # Of TorchScript there is one copy: the second round starts from no gradients.
    for model in (net, ORTModule(net)):
        results = []
        for make in calls:
            arguments = make()
            net.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                y = model(*arguments)
            y.sum().backward()
            grads = [copy.deepcopy(p.grad) for p in net.parameters() if p.grad is not None]
            results += [y.detach(), *grads, *arguments]
        seen.append(results)
    torch.testing.assert_close(seen[1], seen[0])


def _plain() -> tuple[torch.Tensor, ...]:
    return (torch.linspace(-1, 1, 12).reshape(3, 4),)


def _expanded() -> tuple[torch.Tensor, ...]:
    return (torch.ones(1, 4).expand(3, 4),)


def _apart() -> tuple[torch.Tensor, ...]:
    return torch.ones(3, 4), torch.ones(3, 4)


def _views() -> tuple[torch.Tensor, ...]:
    whole = torch.ones(6, 4)
    return whole[:3], whole[3:]


@pytest.mark.parametrize("kind", ["script", "trace", "object"])
def test_a_forward_that_is_no_function(kind: str) -> None:
    torch.manual_seed(0)
    made = {
        "script": lambda: torch.jit.script(_Net()),
        "trace": lambda: torch.jit.trace(_Net(), *_plain()),
        "object": _OfObject,
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = made()
    _assert_same_calls(net, _plain, _plain)


@pytest.mark.parametrize("first", [_plain, _expanded])
def test_a_write_to_an_expanded_argument(first: Callable[..., Any]) -> None:
    _assert_same_calls(_WritesRows(), first, _expanded, _plain)


def test_a_write_beside_another_view_of_one_tensor() -> None:
    _assert_same_calls(_WritesOne(), _apart, _views, _views)
