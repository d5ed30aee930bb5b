# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Two runs of a forward, compared call by call; what the first one made is there in the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import Linear, assert_same_calls
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain.capture.call_path import CallPath, stores_attributes


class Counted(TorchDispatchMode):
    """Counts what is computed."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.calls += 1
        return func(*args, **(kwargs or {}))


def path_of(run: Callable[[], Any], before: CallPath | None = None) -> tuple[CallPath, int]:
    """Return the calls of a run, and how many operators it computed."""
    path, Counted.calls = CallPath(before), 0
    with Counted(), path:
        result = run()
    path.end(result, None)
    return path, Counted.calls


X = torch.randn(3, 4)
LAYER = nn.Linear(4, 4)


def pure() -> torch.Tensor:
    y = LAYER(X).tanh()
    first, second = y.chunk(2, -1)
    with torch.no_grad():
        third = (y * 2).contiguous()
    assert not third.requires_grad
    return (first + second).sum(dim=-1, keepdim=True) * third


def test_equal_calls_are_computed_once() -> None:
    first, computed = path_of(pure)
    again, computed_again = path_of(pure, first)
    assert computed >= 7 and computed_again == 0
    assert again.steps == first.steps
    third, _ = path_of(pure)  # without the first one
    assert third.steps == first.steps


def test_from_another_operand_on_calls_are_computed() -> None:
    first, _ = path_of(lambda: (X + 1, X * 2, X.exp()))
    again, computed = path_of(lambda: (X + 1, X * 3, X.exp()), first)
    assert computed == 1 and again.steps != first.steps
    fewer, _ = path_of(lambda: (X + 1, X * 2), first)
    assert fewer.steps != first.steps
    more, _ = path_of(lambda: (X + 1, X * 2, X.exp(), X.exp()), first)
    assert more.steps != first.steps


def resized() -> torch.Tensor:
    y = X + 1
    rows = y.dim()
    y.unsqueeze_(0)
    return y * rows


def with_gradients() -> torch.Tensor:
    y = X + 1
    needs = y.requires_grad
    y.requires_grad_()
    return y * 2 if needs else y * 3


def given_data() -> torch.Tensor:
    y = X + 1
    rows = y.dim()
    y.data = torch.zeros(1, 3, 4)
    return y * rows


def item_set() -> torch.Tensor:
    y = X + 1
    y[0] = LAYER.weight[0]
    return y


def added() -> torch.Tensor:
    y = X + 1
    y += LAYER.weight[0]
    return y


def written_out() -> torch.Tensor:
    y = torch.empty(0)
    rows = y.dim()
    torch.add(X, 1, out=y)
    return y * rows


def by_overload() -> torch.Tensor:
    y = X + 1
    torch.ops.aten.squeeze_.dim(y, 0)
    torch.ops.aten.squeeze_(y)
    return y


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    "run", [resized, with_gradients, given_data, item_set, added, written_out, by_overload]
)
def test_after_a_write_all_is_computed_again(run: Callable[[], torch.Tensor]) -> None:
    first, computed = path_of(run)
    again, computed_again = path_of(run, first)
    assert computed_again == computed and again.steps == first.steps


class Settles(Linear):
    """Chooses its way at the first call, as models of transformers choose their loss."""

    def __init__(self, run: Callable[[Settles, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run, self.kind, self.size = run, None, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, self.linear(x))


def _late(self: Settles, y: torch.Tensor) -> torch.Tensor:
    z = y.tanh()
    if self.kind is None:
        self.kind = "mean"
    return z.mean() if self.kind == "mean" else z.sum()


def _other_way(self: Settles, y: torch.Tensor) -> torch.Tensor:
    if self.kind is None:
        self.kind = "mean"
        return y.sum()
    return y.mean()


def _other_way_after_a_write(self: Settles, y: torch.Tensor) -> torch.Tensor:
    z = y * 1
    if z.dim() == 2 and self.kind is not None:
        z = z * 2
    z.unsqueeze_(0)
    self.kind = "seen"
    return z.sum()


def _same_result_by_other_operands(self: Settles, y: torch.Tensor) -> torch.Tensor:
    a, b = y.sin(), y.cos()
    first = self.kind is None
    self.kind = "seen"
    return a * 2 + b if first else b * 2 + a


def _other_way_at_other_sizes(self: Settles, y: torch.Tensor) -> torch.Tensor:
    if self.size is None:
        self.size = 5
    elif len(y) == self.size:
        return y.sum() * 3
    return y.sum()


def _grad_mode(self: Settles, y: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(self.kind is not None):
        z = y * 2
    self.kind = "seen"
    return (z + y).sum()


def _with_branches(self: Settles, y: torch.Tensor) -> torch.Tensor:
    z = torch.cond(y.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (y,))
    if self.kind is None:
        self.kind = "mean"
    return z.mean()


def _results_in_a_dictionary(self: Settles, y: torch.Tensor) -> torch.Tensor:
    found = list(y.split(2, -1))
    found.append(found.pop(0) * 2)
    self.kind = "seen"
    return torch.cat(found, -1)


def _seeds(self: Settles, y: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0 if self.kind is None else 1)
    self.kind = "seen"
    return torch.rand_like(y) * y


def _autocast(self: Settles, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.kind is None):
        z = self.linear(y)
    self.kind = "seen"
    return z.float()


def _halved_saves(self: Settles, y: torch.Tensor) -> torch.Tensor:
    if self.kind is None:
        self.kind = "seen"
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0.5, lambda t: t):
            return y * y
    return y * y


def _refused_behind_the_trace(self: Settles, y: torch.Tensor) -> torch.Tensor:
    first = self.kind is None
    self.kind = "seen"
    before = torch.get_rng_state()
    torch.manual_seed(0)
    z = y * torch.rand(len(y), 1)
    torch.set_rng_state(before)
    return z if first else z + 1


WAYS = [
    _seeds,
    _autocast,
    _halved_saves,
    _refused_behind_the_trace,
    _late,
    _other_way,
    _other_way_after_a_write,
    _same_result_by_other_operands,
    _other_way_at_other_sizes,
    _grad_mode,
    _with_branches,
    _results_in_a_dictionary,
]


@pytest.mark.parametrize("run", WAYS, ids=lambda run: run.__name__)
def test_later_calls_are_as_in_pytorch(run: Callable[..., torch.Tensor]) -> None:
    model = assert_same_calls(lambda: Settles(run))
    if run is _late:
        assert len(model.report().captures) == 1 and model.report().native_share == 1


def test_assignments_are_found() -> None:
    assert stores_attributes(nn.Sequential(Settles(_late))) is False  # its function does it
    assert stores_attributes(nn.Sequential(SetsItself()))
    assert not stores_attributes(nn.Linear(2, 2))


class SetsItself(Settles):
    def __init__(self, run: Callable[..., torch.Tensor] = _late) -> None:
        super().__init__(run)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = self.size or None
        return self.run(self, self.linear(x))


@pytest.mark.parametrize("run", WAYS, ids=lambda run: run.__name__)
def test_a_first_call_recorded_in_its_trace(run: Callable[..., torch.Tensor]) -> None:
    model = assert_same_calls(lambda: SetsItself(run))
    if run is _late:
        assert len(model.report().captures) == 1 and model.report().native_share == 1
