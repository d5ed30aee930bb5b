# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients flow where they do in PyTorch: not through what is written under no_grad, or past a detached alias."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

from ortrain import ORTModule

Action = Callable[["Bank", torch.Tensor, torch.Tensor], torch.Tensor]


class Bank(nn.Module):
    """Reads rows of a buffer behind an action that may have written to it."""

    def __init__(self, action: Action) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.register_buffer("rows", torch.zeros(5, 3))
        self.action = action

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return (y - self.action(self, y, at)[at]).square().sum()


def follows(action: Action, steps: int = 2) -> str:
    """Compare steps, and return what the report says of the last capture's fallback."""
    plain = Bank(action)
    ours = ORTModule(copy.deepcopy(plain))
    for seed in range(steps):
        torch.manual_seed(seed)
        x, at = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
        results = []
        for model in (ours, plain):
            model.zero_grad()
            loss = model(x, at)
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in model.parameters()), model.rows])
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    return ours.report().captures[-1].fallback


def _select(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.rows[0] = 0.9 * m.rows[0] + 0.1 * y.mean(0)
    return m.rows


def _view_before(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    row, flat = m.rows[0], m.rows.view(-1)
    with torch.no_grad():
        row.copy_(y.sum(0))
        flat[3:6] = y.mean(0)
    return m.rows + row + flat.view(5, 3)


def _swapped(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        held = m.rows[0].clone()
        m.rows[0] = m.rows[1] + y[0]
        m.rows[1] = held
    return m.rows * y.sum()


def _under_autocast(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        m.rows[0] = m.layer(y).sum(0)
    return m.rows


def _enabled_within(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        with torch.enable_grad():
            twice = y * 2
        m.rows[0] = twice.sum(0)
    return m.rows + twice.sum()


def _out(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch.sum(y, 0, out=m.rows[0])
    return m.rows


def _lists(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch._foreach_add_([m.rows[0], m.rows[1]], [y.sum(0), y.mean(0)])
    return m.rows


def _leaf(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    start = torch.zeros(5, 3).requires_grad_()
    return torch.tanh(start * 2) + y.sum(0)


def _added_to_afterwards(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        frozen = m.rows + y.sum(0)
    frozen += y.mean(0)
    frozen[1] = y[1]
    return frozen


@pytest.mark.parametrize(
    "action",
    [
        *(_select, _view_before, _swapped, _under_autocast, _enabled_within, _out, _lists),
        *(_leaf, _added_to_afterwards),
    ],
)
@pytest.mark.filterwarnings("ignore:.*run in PyTorch")
def test_writes_under_no_grad_end_gradients(action: Action) -> None:
    assert not follows(action)  # one graph


def _detached_row(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    m.rows.detach()[0].copy_(y.sum(0))
    return m.rows


def _detached_alias(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    alias = m.rows.detach()
    alias += y.mean(0)
    return alias


def _other_memory(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    m.rows.data = y[:1].expand(5, 3).clone()
    return m.rows


def _detached_under_autocast(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        alias = y.detach()
    alias.mul_(2.0)
    return y.sum(0).expand(5, 3) * 3


def _detached_for_a_while(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    m.rows.add_(y.sum(0))
    m.rows.detach().clamp_(-1, 1)
    result = m.rows * 5
    m.rows.detach_()
    return result


def _lists_with_gradients(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    parts = [y[0] * 2, y[1] * 3]
    torch._foreach_mul_(parts, y[2, 0])
    torch._foreach_add_(parts, [y[2], y[3]])
    return (parts[0] + parts[1]).expand(5, 3)


class WritesItsOperand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        row.add_(x.mean(0))
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * 2, None


def _in_a_function(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return m.rows + WritesItsOperand.apply(y, m.rows[0]).sum(0)


@pytest.mark.parametrize(
    "action",
    [
        *(_detached_row, _detached_alias, _other_memory, _detached_under_autocast),
        *(_detached_for_a_while, _lists_with_gradients, _in_a_function),
    ],
)
@pytest.mark.filterwarnings("ignore:.*runs? in (PyTorch|pieces)")
def test_writes_past_autograd_are_in_no_graph(action: Action) -> None:
    assert follows(action)


@pytest.mark.filterwarnings("ignore:.*runs? in (PyTorch|pieces)")
def test_a_buffer_with_a_gradient_is_written_to_under_no_grad() -> None:
    plain = Bank(_select)
    plain.rows.requires_grad_()
    ours = ORTModule(copy.deepcopy(plain))
    for model in (ours, plain):
        model(torch.ones(4, 3), torch.tensor([0, 1, 2, 0])).backward()
    torch.testing.assert_close(ours.rows.grad, plain.rows.grad)


def test_an_argument_of_an_earlier_step_that_nothing_reaches() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            x.mul_(2.0)
            return x * self.weight * (z > 0)

    ours = ORTModule(Masked())
    z = torch.ones(2, 3, requires_grad=True) ** 2
    z.sum().backward()
    ours(torch.ones(2, 3), z).sum().backward()
    torch.testing.assert_close(ours.weight.grad, torch.full((3,), 4.0))


def _random_action(seed: int) -> Action:
    """Return an action of views, writes and grad modes that nobody chose."""

    def act(m: Bank, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        draw = random.Random(seed)
        held = [m.rows, m.rows * 1, y.sum(0).expand(5, 3) * 1]
        for _ in range(draw.randint(2, 5)):
            view, source = draw.choice(held), draw.choice(held) * draw.choice([0.5, 1.0])
            kind = draw.choice(["row", "rows", "whole", "flat", "transposed"])
            places = {
                "row": lambda t: t[draw.randrange(5)],
                "rows": lambda t: t[1:4],
                "whole": lambda t: t,
                "flat": lambda t: t.view(-1)[:6],
                "transposed": lambda t: t.t()[1],
            }
            state = draw.getstate()
            place = places[kind](view)
            draw.setstate(state)
            value = places[kind](source).clone()
            write = draw.choice(["copy_", "add_", "mul_", "none"])
            mode = draw.choice([torch.no_grad, torch.no_grad, torch.enable_grad])
            if mode is torch.enable_grad and view is m.rows:
                value = value.detach()
            with mode():
                if draw.random() < 0.2:
                    place = place.detach()
                if write == "none":
                    held.append(held[0] + value.sum())
                elif not (mode is torch.no_grad and place.requires_grad):
                    getattr(place, write)(value)
            if view.dim() == 2 and draw.random() < 0.5:
                held.append(view * 2)
        return held[draw.randrange(len(held))] + held[-1]

    return act


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.filterwarnings("ignore")
def test_random_writes(seed: int) -> None:
    action = _random_action(seed)
    try:
        plain = Bank(action)
        plain(torch.ones(4, 3), torch.tensor([0, 1, 2, 0])).backward()
    except RuntimeError:  # it changes in place what its backward reads
        return
    follows(action)


@pytest.mark.filterwarnings("ignore")
def test_a_reentrant_checkpoint_whose_arguments_want_no_gradient_gives_none() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint.checkpoint(self.inner, x, use_reentrant=True))

    compiled = torch.compile(model := Checkpointed(), backend="ortrain")
    compiled(torch.ones(2, 3)).sum().backward()
    assert model.inner.weight.grad is None and model.head.weight.grad is not None
    ours = ORTModule(Checkpointed())
    for _ in range(3):
        ours(torch.ones(2, 3)).sum().backward()
        assert ours.inner.weight.grad is None and ours.head.weight.grad is not None


def test_hooks_of_parameters_that_no_gradient_reaches_are_not_called() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.gate = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight * (self.gate > 0.5).float()).sum()

    ours = ORTModule(Gated())
    seen: list[torch.Tensor | None] = []
    for parameter in ours.parameters():
        parameter.register_hook(seen.append)
    ours(torch.ones(2, 3)).backward()
    assert len(seen) == 1 and seen[0] is not None
    assert ours.gate.grad is None


def test_torchscript_records_the_module_itself() -> None:
    ours = ORTModule(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)))
    x = torch.ones(3, 4)
    ours(x).sum().backward()
    scripted = torch.jit.trace(ours, x)
    torch.testing.assert_close(scripted(torch.ones(6, 4)), ours(torch.ones(6, 4)))


def test_tensors_without_contents_go_through_pytorch() -> None:
    with torch.device("meta"):
        ours, x = ORTModule(nn.Linear(4, 5)), torch.empty(2, 4)
    with pytest.warns(RuntimeWarning, match="'input' is on device 'meta'"):
        assert ours(x).shape == (2, 5)
