# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Tensors whose memory holds the negative of what they are, as `z.conj().imag` has: DLPack says nothing of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule, ORTTrainer, UnsupportedError, _core, optim
from ortrain.optim import FusedAdamW, FusedSGD, GraphOptimizer

OUTSIDE: dict[str, torch.Tensor] = {}


def negated(*shape: int) -> torch.Tensor:
    """Return a tensor without gaps, which nothing but its bit tells apart."""
    return torch._neg_view(torch.randn(shape))


def imaginary() -> torch.Tensor:
    """Return a single value, which has no gaps whatever its stride, as users come by one."""
    value = torch.fft.fft(torch.randn(7))[1].conj().imag
    assert value.is_neg() and value.is_contiguous()
    return value


class Scaled(nn.Module):
    def __init__(self, where: str, scale: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.where = where
        self.held = [scale]
        if where == "parameter":
            self.scale: Any = nn.Parameter(scale)
        elif where == "buffer":
            self.register_buffer("scale", scale)
        elif where == "attribute":
            self.scale = scale
        OUTSIDE["scale"] = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "list":
            scale = self.held[0]
        else:
            scale = OUTSIDE["scale"] if self.where == "outside" else self.scale
        return x * self.weight * scale


@pytest.mark.parametrize("made", [lambda: negated(4, 3), imaginary])
@pytest.mark.parametrize("where", ["parameter", "buffer", "attribute", "list", "outside"])
def test_state_of_a_module(where: str, made: Callable[[], torch.Tensor]) -> None:
    plain = Scaled(where, made())
    wrapped = ORTModule(plain)
    for _ in range(2):
        x = torch.randn(4, 3, requires_grad=True)
        tensors = [x, *plain.parameters()]
        expected = plain(x)
        grads = torch.autograd.grad(expected.sum(), tensors)
        result = wrapped(x)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(torch.autograd.grad(result.sum(), tensors), grads)


def test_data_of_a_parameter_that_becomes_negated() -> None:
    plain = Scaled("parameter", torch.randn(4, 3))
    wrapped, x = ORTModule(plain), torch.randn(4, 3)
    wrapped(x)
    plain.scale.data = negated(4, 3)
    torch.testing.assert_close(wrapped(x), plain(x))


def test_arguments_and_gradients() -> None:
    layer = nn.Linear(3, 3)
    wrapped = ORTModule(layer)
    x, grad = negated(4, 3).requires_grad_(), negated(4, 3)
    y = wrapped(x)
    torch.testing.assert_close(y, layer(x))
    tensors = [x, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(y, tensors, grad), torch.autograd.grad(layer(x), tensors, grad)
    )


class Descent(GraphOptimizer):
    state_names = ()

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, g: Any, param: Any, grad: Any, state: Any, options: Any) -> Any:
        return param - options["lr"] * grad, {}


@pytest.mark.parametrize("negative", ["parameter", "gradient", "state", "transposed"])
@pytest.mark.parametrize(
    "fused, plain",
    [
        (FusedAdamW, torch.optim.AdamW),
        (lambda p, lr: FusedSGD(p, lr, momentum=0.9), lambda p, lr: torch.optim.SGD(p, lr, 0.9)),
        (Descent, torch.optim.SGD),
    ],
)
def test_optimizers(fused: Callable[..., Any], plain: Callable[..., Any], negative: str) -> None:
    value = {"parameter": negated(4, 3), "transposed": negated(3, 4).T}.get(
        negative, torch.randn(4, 3)
    )
    param, other = nn.Parameter(value), nn.Parameter(value.resolve_neg().clone())
    optimizer, reference = fused([param], lr=0.1), plain([other], lr=0.1)
    for _ in range(3):
        other.grad = torch.randn(4, 3)
        param.grad = torch._neg_view(-other.grad) if negative == "gradient" else other.grad.clone()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(param, other)
        if negative == "state":
            state = optimizer.state[param]
            for name, held in state.items():
                if torch.is_tensor(held) and held.shape == param.shape:
                    state[name] = torch._neg_view(-held)


def test_a_negated_step_is_refused() -> None:
    param = nn.Parameter(torch.randn(3))
    optimizer = FusedAdamW([param], lr=0.1)
    param.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state[param]
    state["step"] = torch._neg_view(-state["step"])
    with pytest.raises(UnsupportedError, match="step is a view of negated memory"):
        optimizer.step()


def test_forwards_that_ask_are_answered() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * (2 if x.is_neg() else 1)

    plain = Asking()
    wrapped = ORTModule(plain)
    for x in (torch.randn(3), negated(3), torch.randn(3)):
        torch.testing.assert_close(wrapped(x), plain(x))


def test_a_trainer_refuses_a_buffer_that_becomes_negated() -> None:
    model = Scaled("buffer", torch.randn(4, 3))
    model.forward = lambda x: (x * model.weight * model.scale).sum()  # type: ignore[method-assign]
    desc = {"inputs": [("x", [4, 3])], "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=0.0))
    trainer.train_step(torch.randn(4, 3))
    model.scale.data = torch._neg_view(model.scale.data)
    with pytest.raises(UnsupportedError, match="negative bit"):
        trainer.train_step(torch.randn(4, 3))


def test_memory_that_is_written_to_by_a_trainer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^'w'.*negative bit is set\); call resolve_neg"):
        _core.TrainingState().share("w", negated(4, 3))
