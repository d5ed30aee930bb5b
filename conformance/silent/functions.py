# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Backwards of the user's own: torch.autograd.Function, gradient reversal, custom operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.silent.parts import Linear
from conformance.silent.program import Session, program


class Reverse(torch.autograd.Function):
    """The identity; its backward turns the gradient around and scales it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.strength * gradient, None


@program()
def gradient_reversal(s: Session) -> None:
    """A domain classifier behind a gradient reversal whose strength grows from step to step."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.label = nn.Linear(4, 4), nn.Linear(4, 2)
            self.domain = nn.Linear(4, 2)
            self.strength = 0.0

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.features(x).tanh()
            return self.label(y), self.domain(Reverse.apply(y, self.strength))

    net = Net()
    model = s.wrap(net)
    for step in range(4):
        net.strength = step / 2
        s.train(model, s.leaf(3, 4))


@program()
def reversal_by_arithmetic(s: Session) -> None:
    """Gradient reversal without a Function: 2 x.detach() - x; straight-through rounding."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            y = 2 * y.detach() - y
            return y + (y.round() - y).detach()

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(3, 4))


class ZeroBackward(torch.autograd.Function):
    """sin, with a backward that is not its derivative."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


@program("pytorch#193279", 2026)
def own_backward_under_func_grad(s: Session) -> None:
    """torch.func.grad inside forward over a Function whose backward is not the derivative."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            slope = torch.func.grad(lambda v: ZeroBackward.apply(v).sum())(x)
            return self.linear(x) * slope, ZeroBackward.apply(self.linear(x))

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.values(3, 4))


class AddInPlace(torch.autograd.Function):
    """x + bias, where the sum is formed in place in a fresh tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y += bias
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient * 2, gradient.sum(0) * 3


@program("pytorch#180642", 2026)
def in_place_inside_a_function(s: Session) -> None:
    """A Function's forward has an in-place operation; the gradient must take the right way out."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return AddInPlace.apply(self.linear(x), self.linear.bias)

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(3, 4))


class RotateInPlace(torch.autograd.Function):
    """Multiplies by a matrix and writes the result over its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(matrix)
        x.copy_(x @ matrix)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (matrix,) = ctx.saved_tensors
        return gradient @ matrix.t(), None


@program("pytorch#184113", 2026)
def function_writes_its_input(s: Session) -> None:
    """A Function marks its input dirty, after a matrix product of it with a fixed rotation."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            turned = RotateInPlace.apply(y, torch.tensor([[0.0, -1.0], [1.0, 0.0]]).repeat(2, 2))
            return turned + y

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(3, 4))


class CountsInBackward(torch.autograd.Function):
    """Doubles, and adds what reaches its backward to a tensor that the caller holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, meter: torch.Tensor) -> torch.Tensor:
        ctx.meter = meter
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.meter.add_(gradient.detach().abs().sum())
        return gradient * 2, None


@program("pytorch#172956", 2026)
def backward_writes_a_tensor(s: Session) -> None:
    """A Function's backward adds to a buffer of the module."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("meter", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return CountsInBackward.apply(self.linear(x), self.meter)

    model = s.wrap(Net())
    for _ in range(4):
        s.train(model, s.leaf(3, 4))


_backwards: list[str] = []


class TellsInBackward(torch.autograd.Function):
    """The identity, whose forward and backward tell a list."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        _backwards.append(f"forward {name}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _backwards.append(f"backward {ctx.name}")
        return gradient, None


@program()
def function_tells_a_list(s: Session) -> None:
    """A Function has effects in Python, in forward and in backward, once per call."""
    _backwards.clear()

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return TellsInBackward.apply(self.linear(x), "a")

    model = s.wrap(Net())
    for _ in range(4):
        s.train(model, s.leaf(3, 4))
        s.see("told", _backwards)


_slope = {"value": 1.0}


class GlobalSlope(torch.autograd.Function):
    """The identity, whose backward scales by a number of a global dict."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * _slope["value"]


@program("pytorch#144344", 2025)
def backward_reads_a_global(s: Session) -> None:
    """What a Function's backward reads changes between calls, and between forward and backward."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return GlobalSlope.apply(self.linear(x))

    model = s.wrap(Net())
    for before, after in ((1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (2.0, 3.0)):
        x = s.leaf(3, 4)
        _slope["value"] = before
        y = model(x)
        _slope["value"] = after
        s.backward(y)
        s.gradients(model, x)
    _slope["value"] = 1.0


class Clipped(torch.autograd.Function):
    """Clamps; returns a mask that has no gradient beside it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = x.abs() < 0.3
        ctx.save_for_backward(mask)
        ctx.mark_non_differentiable(mask)
        return x.clamp(-0.3, 0.3), mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
        (mask,) = ctx.saved_tensors
        return gradient * mask + 0.1 * gradient


@program()
def function_with_a_mask(s: Session) -> None:
    """A Function with an output that is not differentiable, both returned by forward."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return Clipped.apply(self.linear(x))

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(3, 4))
