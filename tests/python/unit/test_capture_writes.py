# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Writes to tensors become new values: what reads the memory later sees them, as in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture import export
from ortrain.capture.convert.registry import conversion
from ortrain.capture.functional import make_functional

Function = Callable[[nn.Module, torch.Tensor], object]


class Writer(nn.Module):
    """A linear layer with buffers, and a function of both."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.arange(4.0))
        self.register_buffer("table", torch.zeros(3, 4))
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self, self.fc(x))


def write_and_read_view(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    y = h * 2
    first = y[0]
    y.add_(1)
    return y + first


def write_through_view(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    y = h.clone()
    y[1:, :2].mul_(3)
    return y.tanh()


def write_through_row(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    y = h.clone()
    row = y.transpose(0, 1)[2]
    row.copy_(h[:, 0])
    return y * row.unsqueeze(1)


def views_before_and_after(m: nn.Module, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = h * 2
    flat = y.view(-1)
    left, right = y[:, :2], y.narrow(1, 2, 2)
    y[:, 0] = 7.0
    before = flat.sum() + left.sum() * right.mean()
    flat_again = y.reshape(-1)
    y.mul_(0.5)
    return before, flat, flat_again, left


def chained(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return (h * 1.0).add_(2).mul_(0.5).clamp_(max=5)


def masked(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    y = h.clone()
    y.masked_fill_(y > 0.5, -1.0)
    y[..., 1:] = h[..., :-1].clone()
    y[..., 0] = 3
    return y


def running_mean(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    m.count.add_(1)
    m.mean.mul_(0.9).add_(h.detach().mean(0) * 0.1)
    return h - m.mean + m.count


def partly_written_buffer(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    before = m.table * 1
    m.table[1] = h.detach()[0]
    m.table[:, 3].zero_()
    return h + m.table.sum() + before.sum()


def batch_norm_twice(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return m.norm(m.norm(h) + 1) * m.norm.running_var


def detached_reader(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    y = h * 2
    frozen = y.detach()
    y.add_(1)
    return y * frozen


def overwritten(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    y = h * 2
    z = y + 1
    y.copy_(h.detach())
    return y * h + z


def in_use(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(h * 1.0, 0.5, training=False).add_(1)


REWRITTEN = [
    write_and_read_view,
    write_through_view,
    write_through_row,
    views_before_and_after,
    chained,
    masked,
    running_mean,
    partly_written_buffer,
    batch_norm_twice,
    detached_reader,
    overwritten,
    in_use,
]


def write_through_diagonal(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    y = h @ h.T
    y.diagonal().fill_(0)
    return y


def write_through_reshape(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    y = h.clone()
    y.view(-1)[:2] = 0
    return y


def change_of_shape(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    y = h @ h.T
    z = y * 1
    return z.t_() + y


def write_through_detached(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    y = h.clone()
    y.detach().mul_(2)
    return h + y


def transposed_after_a_write(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    y = h.T @ h
    row = y[0]
    y.add_(1)
    y.t_()
    return y * 1 + row * 2


LEFT_ALONE = [
    transposed_after_a_write,
    write_through_diagonal,
    write_through_reshape,
    change_of_shape,
    write_through_detached,
]


def known(target: object) -> bool:
    return conversion(target) is not None


def test_inputs_may_have_names_of_python() -> None:
    class Module(nn.Module):
        def forward(self, input: torch.Tensor, float: torch.Tensor) -> torch.Tensor:
            return (input * 2).sub_(float)

    first, second = torch.randn(3), torch.randn(3)
    wrapped = ORTModule(Module())
    torch.testing.assert_close(wrapped(first, float=second), first * 2 - second)
    assert wrapped.report().native_share == 1.0


def exported(module: nn.Module) -> torch.export.ExportedProgram:
    rows = {0: torch.export.Dim.AUTO}
    return torch.export.export(module, (torch.randn(6, 4),), dynamic_shapes=(rows,), strict=False)


def test_programs_without_writes_of_theirs_stay() -> None:
    program = exported(Writer(chained))
    before = program.graph
    assert not make_functional(program, lambda target: "clamp" not in str(target) and known(target))
    assert program.graph is before
    assert make_functional(program, known)
    assert program.graph is not before
    program.graph.lint()


@pytest.mark.parametrize("function", LEFT_ALONE, ids=lambda f: f.__name__)
def test_other_writes_are_left_to_pytorch(function: Function) -> None:
    program = exported(Writer(function))
    before, specs = str(program.graph), list(program.graph_signature.output_specs)
    assert not make_functional(program, known)
    assert str(program.graph) == before
    assert program.graph_signature.output_specs == specs


def test_inputs_written_to_are_left_to_pytorch() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1) * 2

    assert not make_functional(exported(Module()), known)


def test_a_buffer_with_two_names_is_left_to_pytorch() -> None:
    module = Writer(running_mean)
    module.register_buffer("same", module.mean)
    module.function = lambda m, h: running_mean(m, h) + m.same
    assert not make_functional(exported(module), known)


def flat(result: object) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]  # type: ignore[list-item]


@pytest.mark.parametrize("function", [*REWRITTEN, *LEFT_ALONE], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_steps_are_those_of_pytorch(function: Function) -> None:
    plain = Writer(function)
    ours = copy.deepcopy(plain)
    wrapped = ORTModule(ours)
    traced = mock.patch.object(
        torch.export.ExportedProgram,
        "run_decompositions",
        autospec=True,
        side_effect=torch.export.ExportedProgram.run_decompositions,
    )
    with traced as decompose:
        for rows in (6, 8, 6):
            x = torch.randn(rows, 4)
            expected, actual = flat(plain(x)), flat(wrapped(x))
            for e, a in zip(expected, actual, strict=True):
                torch.testing.assert_close(a, e)
            sum(e.sum() for e in expected).backward()
            sum(a.sum() for a in actual).backward()
            torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))
    if function in REWRITTEN:
        assert not decompose.called
        assert wrapped.report().native_share == 1.0
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def detached_parts(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    h.detach().chunk(2, 1)[0].mul_(0.5)
    return h * 2


def detached_in_a_region(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        d = h.detach()
    d.mul_(0.5)
    return h * 2


def view_in_a_region(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h[:, 0] = 0
    return h * 2


BEHIND_AUTOGRAD = [write_through_detached, detached_parts, detached_in_a_region, view_in_a_region]


@pytest.mark.parametrize("function", BEHIND_AUTOGRAD, ids=lambda f: f.__name__)
def test_writes_behind_autograd_run_in_pytorch(function: Function) -> None:
    plain, ours = Writer(function), Writer(function)
    x = torch.randn(6, 4)
    with pytest.warns(RuntimeWarning, match="into a tensor that gradients flow through"):
        ORTModule(ours)(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(ours.fc.weight.grad, plain.fc.weight.grad)


def test_running_statistics_have_no_gradient() -> None:
    def function(m: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return m.norm(h) + m.norm.running_mean + m.norm.running_var

    plain, ours = Writer(function), Writer(function)
    x, weight = torch.randn(6, 4), torch.randn(6, 4)
    (ORTModule(ours)(x) * weight).sum().backward()
    (plain(x) * weight).sum().backward()
    torch.testing.assert_close(ours.fc.weight.grad, plain.fc.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("function", REWRITTEN, ids=lambda f: f.__name__)
def test_both_ways_compute_the_same(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 4)

    def results() -> list[torch.Tensor]:
        module = Writer(function)
        made = flat(ORTModule(module)(x))
        sum(m.sum() for m in made).backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        return [*(m.detach() for m in made), *grads, *module.buffers()]

    rewritten = results()
    monkeypatch.setattr(export, "make_functional", lambda *_: False)
    for a, b in zip(rewritten, results(), strict=True):
        torch.testing.assert_close(a, b)
