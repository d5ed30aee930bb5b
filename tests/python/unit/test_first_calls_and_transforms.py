# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Layers that their first call initializes, transforms inside of a forward, tensors of classes of the user's own."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch
from side_by_side import Linear, assert_same_calls
from torch import nn

from ortrain import ORTModule


class Lazy(Linear):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.late = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.linear(x)) + torch.rand(())


class LazyAndCounting(Lazy):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class MadeInForward(Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if not hasattr(self, "late"):
            self.late = nn.Linear(4, 4)
        return self.late(self.linear(x)) * self.calls + torch.rand(())


@pytest.mark.parametrize("kind", [Lazy, LazyAndCounting])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LazyLinear(3),
        lambda: nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(2)),
    ],
)
def test_a_lazy_layer_draws_what_it_draws_in_pytorch(kind: type[Lazy], make: Any) -> None:
    assert_same_calls(lambda: kind(make()))


def test_a_layer_that_the_first_call_makes() -> None:
    assert_same_calls(MadeInForward)


def test_with_its_layers_initialized_a_module_is_captured() -> None:
    model = assert_same_calls(lambda: Lazy(nn.LazyLinear(3)))
    assert [record.first_call for record in model.report().captures] == [True, False]
    assert model.report().captures[1].native_nodes


class OtherBackward(torch.autograd.Function):
    """Doubles; its gradient is no derivative of that."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 7


class Slope(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.func.grad(lambda v: OtherBackward.apply(v).sum())(x)


class Pullback(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, pull = torch.func.vjp(OtherBackward.apply, self.linear(x))
        return pull(torch.ones(len(x), 4))[0] + self.linear(x)


class SlopeInPieces(Slope):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += int(x.detach().sum() > -1e9)
        return super().forward(x) * self.calls


class PlainSlope(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.func.grad(lambda v: v.tanh().sum())(x)


@pytest.mark.parametrize("kind", [Slope, Pullback, SlopeInPieces, PlainSlope])
def test_transforms_inside_of_a_forward(kind: type[Linear]) -> None:
    assert_same_calls(kind)


class CountsInAContext(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.calls = contextvars.ContextVar("calls")
        self.calls.set(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.set(self.calls.get() + 1)
        return self.linear(x) * self.calls.get()


def test_a_context_variable_is_set_once_per_call() -> None:
    assert_same_calls(CountsInAContext)


class Doubling(torch.Tensor):
    """What multiplication gives is doubled."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result + result if function is torch.Tensor.mul else result


class Multiplies(Linear):
    def __init__(self, held: torch.Tensor | None = None, how: str = "") -> None:
        super().__init__()
        self.held = held
        if how == "buffer":
            del self.held
            self.register_buffer("held", held)

    def forward(self, x: Any, factors: Any = ()) -> torch.Tensor:
        y = self.linear(x["x"] if isinstance(x, dict) else x).mul(2.0)
        for factor in factors:
            y = factor.mul(y)
        return y if self.held is None else self.held.mul(y)


def _plain_and_own() -> list[tuple[Any, ...]]:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    own = x.as_subclass(Doubling)
    return [(x,), (x,), (own,), ({"x": own},), (x, [own]), (x,)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("how", ["", "attribute", "buffer"])
def test_tensors_of_a_class_of_their_own_keep_it(how: str) -> None:
    held = torch.full((4,), 3.0).as_subclass(Doubling) if how else None
    plain, wrapped = Multiplies(held, how), ORTModule(Multiplies(held, how))
    for args in _plain_and_own():
        expected, actual = plain(*args), wrapped(*args)
        assert type(actual) is type(expected)
        torch.testing.assert_close(
            actual.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor)
        )
