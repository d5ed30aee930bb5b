# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Branches on values of tensors are part of one graph while they go as before, and PyTorch's where they do not."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule


@pytest.fixture(autouse=True)
def whole_where_possible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ORTRAIN_PIECES", "worthwhile")
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Computes by a function of itself and a tensor, beside a counter."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.compute = compute
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return self.compute(self, self.linear(x))


def at_end(m: Any, y: torch.Tensor) -> Any:
    return y * 2 if y.sum() > 0 else y - 1


def of_all(m: Any, y: torch.Tensor) -> Any:
    if not torch.isfinite(y).all():
        y = torch.nan_to_num(y)
    return y + 1


def several(m: Any, y: torch.Tensor) -> Any:
    for i in range(3):
        if y.mean() > 0.1 * i:
            y = y * 1.5
    return y


def changed_afterwards(m: Any, y: torch.Tensor) -> Any:
    total = y.sum() > 0
    if total:
        y = y * 3
    total.logical_not_()
    return y + total


def of_a_count(m: Any, y: torch.Tensor) -> Any:
    positive = (y > 0).sum()
    return y * 2 if positive and positive != 3 else y.cos()


def by_larger(m: Any, y: torch.Tensor) -> Any:
    return y * max(y.sum(), y.mean() * 2)


def without_gradients(m: Any, y: torch.Tensor) -> Any:
    with torch.no_grad():
        scale = 2.0 if y.abs().max() > 1 else 1.0
    return y * scale


def under_autocast(m: Any, y: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        z = m.linear(y)
        if z.float().sum() > 0:
            z = z * 2
    return z.float() + y


def in_a_checkpoint(m: Any, y: torch.Tensor) -> Any:
    def layer(t: torch.Tensor) -> torch.Tensor:
        return t.sin() if t.sum() > 0 else t.cos()

    return checkpoint(layer, y, use_reentrant=False)


def in_a_loop(m: Any, y: torch.Tensor) -> Any:
    for _ in range(5):
        if y.norm() < 1:
            break
        y = y * 0.5
    return y


def in_a_transform(m: Any, y: torch.Tensor) -> Any:
    return y * torch.func.grad(lambda t: t.sin().sum())(y) * (2 if y.sum() > 0 else 3)


def in_a_result(m: Any, y: torch.Tensor) -> Any:
    flag = y.sum() > 0
    return {"y": y * 2 if flag else y, "flag": flag, "y again": y[:1]}


def changing_a_buffer(m: Any, y: torch.Tensor) -> Any:
    if y.sum() > 0:
        m.count.mul_(2)
    return y + m.count


def keeping(m: Any, y: torch.Tensor) -> Any:
    m.kept = 2 if y.sum() > 0 else 3
    return y * m.kept


WAYS = [
    *(at_end, of_all, several, changed_afterwards, of_a_count, by_larger, without_gradients),
    *(under_autocast, in_a_checkpoint, in_a_loop, in_a_transform, in_a_result),
    *(changing_a_buffer, keeping),
]


def outcome(module: nn.Module, x: torch.Tensor) -> list[Any]:
    """Return what a call and its backward leave behind."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    result = module(x)
    parts = [*result.values()] if isinstance(result, dict) else [result]
    sum(p.sin().sum() for p in parts if p.requires_grad).backward()
    inner = getattr(module, "_module", module)
    tensors = [*parts, x.grad, *(p.grad for p in module.parameters()), *module.buffers()]
    return [*(t.detach().clone() for t in tensors), getattr(inner, "kept", None)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_as_in_pytorch_whichever_way_they_go(way: Any) -> None:
    torch.manual_seed(0)
    module = Net(way)
    plain = copy.deepcopy(module)
    wrapped = ORTModule(module)
    draw = random.Random(0)
    for step in range(14):
        x = torch.randn(2 + step % 3, 4)
        # Mostly one way, so that the graph stays; sometimes the other one; infinite once.
        x = x.abs() * (1 if draw.random() < 0.8 else -3)
        if step == 9:
            x[0, 0] = float("inf")
        for got, want in zip(outcome(wrapped, x), outcome(plain, x), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("way", [at_end, of_all, several, of_a_count, changed_afterwards])
def test_one_graph_holds_all_of_it(way: Any) -> None:
    torch.manual_seed(1)
    wrapped = ORTModule(Net(way))
    x = torch.randn(2, 4)
    for rows in (2, 2, 3, 5):
        wrapped(x.repeat(rows, 1)).sum().backward()
    first, *graphs = wrapped.report().captures
    assert first.first_call
    assert len(graphs) == 1
    assert graphs[0].branches
    assert graphs[0].native_nodes > 0
    assert "while branches on values go as before" in str(wrapped.report())


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_generators_stand_where_pytorch_leaves_them() -> None:
    def drawing(m: Any, y: torch.Tensor) -> Any:
        y = y * torch.rand(())
        if torch.rand(()) < 0.3:  # as layers that are dropped
            y = y * torch.rand(())
        return y

    module = Net(drawing)
    plain = copy.deepcopy(module)
    wrapped = ORTModule(module)
    x = torch.ones(2, 4)
    for step in range(20):
        found = []
        for each in (wrapped, plain):
            torch.manual_seed(step)
            found.append((each(x).detach(), torch.rand(2)))
        torch.testing.assert_close(found[0], found[1])


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_what_goes_another_way_too_often_is_left() -> None:
    module = Net(at_end)
    wrapped = ORTModule(module)
    x = torch.ones(2, 4)
    sign = 1.0
    for _ in range(24):
        sign = -sign
        with torch.no_grad():
            module.linear.bias.fill_(100 * sign)
        torch.testing.assert_close(wrapped(x), module(x))
    graphs = [r for r in wrapped.report().captures if r.branches]
    assert len(graphs) == 2  # the first calls are no reason to give up
    assert wrapped.report().captures[-1].fallback


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_errors_are_raised_as_in_pytorch() -> None:
    def refusing(m: Any, y: torch.Tensor) -> Any:
        if y.abs().sum() > 1000:
            raise ValueError("it is too large")
        return y

    module = Net(refusing)
    wrapped = ORTModule(module)
    for _ in range(3):
        wrapped(torch.ones(2, 4)).sum().backward()
    count = module.count.item()
    with pytest.raises(ValueError, match="it is too large"):
        wrapped(torch.full((2, 4), 1e6))
    assert module.count.item() == count + 1
    wrapped(torch.ones(2, 4)).sum().backward()
    assert sum(bool(r.branches) for r in wrapped.report().captures) == 1


def test_distributions_that_validate_their_arguments() -> None:
    def likelihood(m: Any, y: torch.Tensor) -> Any:
        return torch.distributions.Normal(y, y.exp(), validate_args=True).log_prob(y * 0.5)

    module = Net(likelihood)
    plain = copy.deepcopy(module)
    wrapped = ORTModule(module)
    for rows in (2, 3, 4):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(wrapped(x), plain(x))
    with pytest.raises(ValueError, match="Expected parameter loc"):
        wrapped(torch.full((2, 4), float("nan")))
    assert wrapped.report().captures[-1].branches


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_a_second_backward_and_gradients_of_gradients() -> None:
    module = Net(at_end)
    plain = copy.deepcopy(module)
    wrapped = ORTModule(module)
    for _ in range(3):
        found = []
        for each in (wrapped, plain):
            x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
            y = each(x).sin().sum()
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
            found.append(torch.autograd.grad(slope.square().sum(), x)[0])
        torch.testing.assert_close(*found)


def test_functions_of_the_users_own_do_not_run_twice() -> None:
    runs: list[int] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return t * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    def calling(m: Any, y: torch.Tensor) -> Any:
        y = Doubled.apply(y)
        return y if y.sum() > 0 else -y

    wrapped = ORTModule(Net(calling))
    for _ in range(3):
        wrapped(torch.randn(2, 4))
    assert not any(r.branches for r in wrapped.report().captures)


def test_operators_of_the_users_own_do_not_run_twice() -> None:
    calls = []
    library = torch.library.Library("ortrain_test_branches", "DEF")
    library.define("noted(Tensor x) -> Tensor")

    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.clone()

    library.impl("noted", noted, "CPU")
    torch.library.register_fake("ortrain_test_branches::noted", torch.empty_like, lib=library)

    def compute(m: Any, y: torch.Tensor) -> torch.Tensor:
        z = torch.ops.ortrain_test_branches.noted(y.detach())
        return y if (y > 0).all() else y * 2 + z

    ours = ORTModule(Net(compute))
    for i in range(8):
        ours(torch.full((2, 4), 1.0 if i != 5 else -1.0))
    assert len(calls) == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_overflows_in_16_bits_is_seen(dtype: torch.dtype) -> None:
    class Clamped(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = x * y
            if torch.isinf(h).any():
                h = torch.clamp(h, -6e4, 6e4)
            if not torch.isfinite((x * y).float()).all():
                h = h - 2
            return torch.where(h == x, h - 1, h + 1)

    module = Clamped()
    ours = ORTModule(module)
    large = 300.0 if dtype is torch.float16 else 1e20
    for value in [2.0, 2.0, 2.0, large, 2.0, large]:
        x = torch.full((3, 8), value, dtype=dtype)
        torch.testing.assert_close(ours(x, x), module(x, x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_a_nan_on_the_way_that_is_not_taken_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_CHECK_NAN", "1")
    module = Net(lambda m, y: y / y if (y != 0).all() else y + 1)
    nn.init.zeros_(module.linear.bias)
    ours = ORTModule(module)
    for value in (1.0, 1.0, 1.0, 0.0, 1.0):
        x = torch.full((2, 4), value)
        torch.testing.assert_close(ours(x), module(x))


@pytest.mark.parametrize("kind", ["attribute", "argument"])
def test_beside_a_number_that_varies_there_is_one_graph(kind: str) -> None:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.scale = 1.0

        def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            y = self.linear(x)
            if not torch.isfinite(x).all():
                return torch.nan_to_num(y)
            return y * self.scale * factor

    plain = Annealed()
    wrapped = ORTModule(copy.deepcopy(plain))
    for i in range(12):
        value = 1.0 - 0.05 * i
        x = torch.randn(3, 4) if i != 9 else torch.full((3, 4), torch.inf)
        if kind == "attribute":
            plain.scale = wrapped.scale = value
        given = () if kind == "attribute" else (value,)
        torch.testing.assert_close(wrapped(x, *given), plain(x, *given))
    (graph,) = [c for c in wrapped.report().captures if not c.fallback]
    assert graph.branches


def test_many_kinds_of_calls_beside_a_number_that_varies() -> None:
    class Kinds(nn.Module):
        def forward(self, x: torch.Tensor, kind: str, factor: float) -> torch.Tensor:
            if not torch.isfinite(x).all():
                return torch.nan_to_num(x)
            return (x + len(kind)) * factor

    wrapped = ORTModule(Kinds())
    for i in range(60):
        x, kind = torch.randn(3), "a" * (i % 6)
        expected = (x + len(kind)) * (1 + i / 7)
        torch.testing.assert_close(wrapped(x, kind, 1 + i / 7), expected)
    assert len([c for c in wrapped.report().captures if c.branches]) == 6


def test_numbers_taken_out_of_tensors_are_no_branches() -> None:
    def rolled(m: Any, y: torch.Tensor) -> Any:
        return y.roll(int(y.argmax()), 0) if y.sum() > 0 else y

    module = Net(rolled)
    plain = copy.deepcopy(module)
    wrapped = ORTModule(module)
    for step in range(4):
        x = torch.randn(3, 4) + step
        torch.testing.assert_close(wrapped(x), plain(x))


def after_dropout(m: Any, y: torch.Tensor) -> Any:
    keep = nn.functional.dropout(torch.ones(1), 0.1, m.training).sum()
    return y if keep == 0 else y * keep


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_branches_on_masks_are_as_likely_as_in_pytorch() -> None:
    wrapped = ORTModule(Net(after_dropout))
    for _ in range(4):
        wrapped(torch.ones(2, 4))
    assert not any(r.branches for r in wrapped.report().captures)


def test_runs_that_count_for_nothing_leave_nothing() -> None:
    module = Net(at_end)
    wrapped = ORTModule(module)
    x = torch.ones(2, 4)

    def call(sign: float) -> None:
        with torch.no_grad():
            module.linear.bias.fill_(100 * sign)
        wrapped(x).sum().backward()

    for _ in range(40):
        call(1.0)
    gc.collect()
    gc.disable()
    try:
        call(-1.0)
        left = [o for o in gc.get_objects() if type(o).__name__ in ("ForwardError", "Pass")]
        assert not left
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_ways_that_raise_if_they_are_not_taken() -> None:
    def looked_up(m: Any, y: torch.Tensor) -> Any:
        index = (y.detach().abs().sum(-1) * 0 + m.place).long()
        if (index >= 4).any():
            index = index.clamp(max=3)
        return m.linear.weight[index] * y

    module = Net(looked_up)
    module.register_buffer("place", torch.zeros(()))
    plain = copy.deepcopy(module)
    wrapped = ORTModule(module)
    for step in range(40):
        for each in (module, plain):
            each.place.fill_(9.0 if step in (10, 30) else step % 4)
        x = torch.randn(2, 4)
        torch.testing.assert_close(wrapped(x), plain(x))
    graphs = [r for r in wrapped.report().captures if r.branches]
    assert len(graphs) == 1
    assert not wrapped.report().captures[-1].fallback


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_training_and_evaluation_branch_by_themselves() -> None:
    def by_mode(m: Any, y: torch.Tensor) -> Any:
        if m.training:
            return y if torch.isfinite(y).all() else y * 0
        return y * 2 if y.abs().max() < 1e9 else y

    wrapped = ORTModule(Net(by_mode))
    for mode in (True, False, True, False, True):
        wrapped.train(mode)
        for _ in range(3):
            wrapped(torch.randn(2, 4))
    captures = wrapped.report().captures
    assert sum(bool(r.branches) for r in captures) == 2
    assert all(r.first_call or r.branches for r in captures)


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_what_initializes_itself_is_looked_at_again() -> None:
    def initialized(m: Any, y: torch.Tensor) -> Any:
        if not m.is_set:
            m.is_set.fill_(True)
            m.scale.copy_(y.detach().std() + 1)
        return y / m.scale

    module = Net(initialized)
    module.register_buffer("is_set", torch.tensor(False))
    module.register_buffer("scale", torch.ones(()))
    plain = copy.deepcopy(module)
    wrapped = ORTModule(module)
    for _ in range(12):
        x = torch.randn(2, 4)
        torch.testing.assert_close(wrapped(x), plain(x))
    assert wrapped.report().captures[-1].branches
