# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Results that do not lie row by row, and which PyTorch's backward reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.signature import order_of
from tests.python.unit.side_by_side import Linear, assert_same_calls


class Applies(Linear):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


_SAVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda y: y.T.tanh(),
    "behind another": lambda y: y.T.exp().sigmoid(),
    "broadcast": lambda y: (y.T + y.sum()).tanh(),
    "channels last": lambda y: (
        y.reshape(1, 4, -1, 1).contiguous(memory_format=torch.channels_last).exp()
    ),
}
_FREE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a sum": lambda y: y.T + 1,
    "a copy": lambda y: y.tanh().T.contiguous(),
    "broadcast": lambda y: y[:1].T + y.T,
}


@pytest.mark.parametrize("name", _SAVED)
def test_a_write_to_what_backward_reads_raises(name: str) -> None:
    for wrap in (lambda net: net, ORTModule):
        result = wrap(Applies(_SAVED[name]))(torch.ones(2, 4))
        result.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.square().sum().backward()


@pytest.mark.parametrize("name", _FREE)
def test_other_writes_do_not(name: str) -> None:
    gradients = []
    for wrap in (lambda net: net, ORTModule):
        net: nn.Module = Applies(_FREE[name])
        result = wrap(net)(torch.ones(2, 4))
        stride = result.stride()
        result.add_(1)
        result.square().sum().backward()
        gradients.append([p.grad for p in net.parameters()] + [torch.tensor(stride)])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_calls_without_writes() -> None:
    model = assert_same_calls(lambda: Applies(_SAVED["broadcast"]), rows=(3, 5, 1, 3))
    assert all(record.native_nodes > 0 for record in model.report().captures)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.layer(x))


def _image() -> torch.Tensor:
    image = torch.linspace(-1, 1, 2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    return image.to(memory_format=torch.channels_last).requires_grad_()


def test_gradients_of_gradients() -> None:
    found = []
    for net in (ChannelsLast(), ORTModule(ChannelsLast())):
        x = _image()
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found.append([p.grad for p in net.parameters()] + [x.grad])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("tracks", [False, True])
def test_results_that_share_memory_share_it(tracks: bool) -> None:
    class Two(ChannelsLast):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.layer(x).contiguous(memory_format=torch.channels_last)
            return y, y[:, 1:]

    with torch.set_grad_enabled(tracks):
        whole, part = ORTModule(Two())(_image())
        with torch.no_grad():
            whole.zero_()
    assert part.abs().sum() == 0


def test_the_order_of_expanded_axes_is_that_of_pytorchs_results() -> None:
    """Of all permutations of three axes, whichever of them are expanded."""
    for order in itertools.permutations(range(3)):
        for expanded in itertools.product((False, True), repeat=3):
            dense = torch.ones(
                [1 if one else size for one, size in zip(expanded, (3, 4, 5), strict=True)]
            )
            x = dense.expand(3, 4, 5).permute(order)
            strides = (x * 2).stride()
            expected = tuple(sorted(range(3), key=lambda axis: -strides[axis]))
            assert (order_of(x) or (0, 1, 2)) == expected, (order, expanded)


def test_a_result_of_an_expanded_argument_lies_as_in_pytorch() -> None:
    """So that it may be viewed as there."""
    double = ORTModule(Doubles())
    for x in (torch.ones(3, 4), torch.ones(1, 4).expand(3, 4), torch.ones(3, 1).expand(3, 4)):
        assert double(x).stride() == (x * 2).stride()
        double(x).view(-1)


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2
