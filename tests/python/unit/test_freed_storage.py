# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Tensors whose storage was freed while their shape stayed, as sharded trainers do: an error names them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ortrain import DeviceError, ORTModule, UnsupportedError
from ortrain.optim import FusedAdamW


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(ids) + x) * self.scale


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("name", ["embedding.weight", "linear.weight", "linear.bias", "scale"])
def test_parameters_and_buffers_are_named(name: str) -> None:
    plain = Model()
    model = ORTModule(plain)
    ids, x = torch.tensor([[1, 2]]), torch.randn(1, 2, 4)
    model(ids, x).sum().backward()
    free(plain.state_dict()[name])
    with pytest.raises(DeviceError, match=f"'{name}' has no memory"):
        model(ids, x)


@pytest.mark.parametrize("position", [0, 1])
def test_inputs_are_named(position: int) -> None:
    model = ORTModule(Model())
    inputs = [torch.tensor([[1, 2]]), torch.randn(1, 2, 4)]
    model(*inputs)
    free(inputs[position])
    with pytest.raises(DeviceError, match=f"input '{('ids', 'x')[position]}.*has no memory"):
        model(*inputs)


def test_transposed_inputs_are_named() -> None:
    model = ORTModule(Model())
    ids, x = torch.tensor([[1, 2]]), torch.randn(1, 4, 2).transpose(1, 2)
    model(ids, x)
    free(x)
    with pytest.raises(DeviceError, match="input 'x.*has no memory"):
        model(ids, x)


def test_the_gradient_of_a_result_is_named() -> None:
    model = ORTModule(Model())
    result = model(torch.tensor([[1, 2]]), torch.randn(1, 2, 4))
    gradient = torch.ones_like(result)
    free(gradient)
    with pytest.raises(DeviceError, match="gradient of output .* has no memory"):
        result.backward(gradient)


def test_without_elements_no_memory_is_needed() -> None:
    model = ORTModule(nn.Linear(4, 3))
    model(torch.randn(2, 4))
    x = torch.randn(0, 4)
    free(x)
    assert model(x).shape == (0, 3)


def test_optimizers_refuse_them() -> None:
    parameter = nn.Parameter(torch.randn(4))
    parameter.grad = torch.ones(4)
    optimizer = FusedAdamW([parameter])
    free(parameter.grad)
    with pytest.raises(UnsupportedError, match="without memory"):
        optimizer.step()
