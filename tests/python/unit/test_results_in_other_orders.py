# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Results that do not lie row by row, and which PyTorch's backward reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ortrain import ORTModule
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
