# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Autograd functions whose `apply` was taken by another name before a capture, as PyTorch's tutorials do."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule
from ortrain.capture.torch_internals import TORCH_VERSION

pytestmark = pytest.mark.filterwarnings("ignore:.*run in PyTorch:RuntimeWarning")


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 10 * ctx.scale, None


reverse = Reversed.apply
round_through = Rounded.apply
scale = Scaled.apply


class Within(torch.autograd.Function):
    """Applies another one, and an alias of it, in its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return Reversed.apply(reverse(x)) * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 7


class OwnApply(torch.autograd.Function):
    @classmethod
    def apply(cls, x: torch.Tensor) -> torch.Tensor:
        return super().apply(x * 2)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


within = Within.apply
own_apply = OwnApply.apply
# apply() has taken options by name since PyTorch 2.12.
partial = functools.partial(scale, scale=3.0) if TORCH_VERSION >= (2, 12) else round_through
TABLE = {"round": round_through}


def closing() -> Callable[[torch.Tensor], torch.Tensor]:
    held = Rounded.apply
    return lambda x: held(x)


closed = closing()


class Net(nn.Module):
    of_class = Rounded.apply

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.form, self.held = form, Rounded.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FORMS[self.form](self, self.linear(x))


FORMS: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "global": lambda net, x: reverse(x),
    "attribute": lambda net, x: net.held(x),
    "of the class": lambda net, x: type(net).of_class(x),
    "default": lambda net, x, held=round_through: held(x),
    "partial": lambda net, x: partial(x),
    "entry": lambda net, x: TABLE["round"](x),
    "closure": lambda net, x: closed(x),
    "setup_context": lambda net, x: scale(x) + scale(x, 3.0),
    "of the base": lambda net, x: torch.autograd.Function.apply.__func__(Rounded, x),
    "checkpoint": lambda net, x: checkpoint(round_through, x, use_reentrant=False),
    "one in another": lambda net, x: within(x),
    "an apply of its own": lambda net, x: own_apply(x) + OwnApply.apply(x),
    "several": lambda net, x: reverse(Rounded.apply(reverse(Reversed.apply(x)))),
}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_function(form: str) -> None:
    plain = Net(form)
    ours, x = ORTModule(copy.deepcopy(plain)), torch.linspace(-2, 2, 6).reshape(2, 3)
    for training in (True, True, False):
        seen = []
        for net in (plain, ours):
            net.zero_grad()
            y = net.train(training)(x)
            y.square().sum().backward()
            seen.append([y.detach(), *(p.grad for p in net.parameters())])
        torch.testing.assert_close(seen[1], seen[0])


def test_what_an_alias_counts_is_counted() -> None:
    calls: list[str] = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            calls.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            calls.append("backward")
            return gradient * 2

    counted = Counted.apply

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return counted(self.linear(x))

    ours = ORTModule(Counting())
    for step in range(1, 4):
        ours(torch.ones(2, 3)).sum().backward()
        assert calls == ["forward", "backward"] * step


def test_pytorchs_own_method_is_back_after_a_capture() -> None:
    ORTModule(Net("global"))(torch.ones(2, 3))
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    x = torch.ones(2, requires_grad=True)
    reverse(x).sum().backward()
    assert x.grad.tolist() == [-1.0, -1.0]
