# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A program that writes to nothing is not traced a second time, and means the same."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture import export
from ortrain.capture.convert.registry import conversion
from ortrain.capture.functional import inline_regions, make_functional


def known(target: object) -> bool:
    return conversion(target) is not None


class Layer(nn.Module):
    """A linear layer and a function of its result."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.fc(x))


class Columns(nn.Module):
    """A module on the transposed input, as one sample."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x.T.unsqueeze(0))


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale, shift = x.abs().amax(), x.mean()
        with torch.enable_grad():
            shift = shift * 2
    return x / scale + shift


def sized(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first, second * (x.shape[0] // 2)]).reshape(x.shape[0], -1).contiguous()


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.T


FUNCTIONAL = {
    "plain": torch.tanh,
    "no_grad": without_gradient,
    "sizes": sized,
    "dropout": lambda x: nn.functional.dropout(x, 0.5, training=False),
    "batch_norm_in_use": nn.BatchNorm1d(4).eval(),
    "cast": lambda x: x.to(torch.float64).type_as(x),
}
LEFT_TO_PYTORCH = {
    "autocast": under_autocast,
    "no_grad_write": lambda x: torch.no_grad()(lambda y: y.detach().clone().add_(1))(x),
    "instance_norm": Columns(nn.InstanceNorm1d(4, track_running_stats=True)),
}


def exported(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.export.ExportedProgram:
    rows = {0: torch.export.Dim.AUTO}
    return torch.export.export(
        Layer(function), (torch.randn(6, 4),), dynamic_shapes=(rows,), strict=False
    )


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_programs_are_recognised(name: str) -> None:
    program = exported(FUNCTIONAL[name])
    assert make_functional(program, known)
    inline_regions(program)
    program.graph.lint()
    assert not [n for n in program.graph.nodes if n.op == "get_attr"]


@pytest.mark.parametrize("name", LEFT_TO_PYTORCH)
def test_other_programs_are_not_taken_for_functional(name: str) -> None:
    assert not make_functional(exported(LEFT_TO_PYTORCH[name]), known)


def test_unknown_operators_are_decomposed() -> None:
    assert not make_functional(exported(torch.tanh), lambda target: False)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_values_and_gradients_are_those_of_pytorch(name: str) -> None:
    plain, ours = Layer(FUNCTIONAL[name]), Layer(FUNCTIONAL[name])
    wrapped = ORTModule(ours)
    with mock.patch.object(torch.export.ExportedProgram, "run_decompositions") as traced:
        for rows in (6, 8):
            x = torch.randn(rows, 4)
            expected, actual = plain(x), wrapped(x)
            torch.testing.assert_close(actual, expected)
            expected.sum().backward()
            actual.sum().backward()
    assert not traced.called
    assert wrapped.report().native_share == 1.0
    for mine, theirs in zip(ours.fc.parameters(), plain.fc.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_both_ways_give_the_same_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def operators() -> list[str]:
        captured = export.capture(Layer(without_gradient), (torch.randn(6, 4),), known=known)
        nodes = captured.graph_module.graph.nodes
        return [str(n.target) for n in nodes if str(n.target).startswith("aten.")]

    inlined = operators()
    monkeypatch.setattr(export, "make_functional", lambda *_: False)
    assert inlined == operators()
