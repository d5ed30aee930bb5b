# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators without a conversion come apart where they stand, and mean the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortrain import ORTModule
from ortrain.capture import expansion, export
from ortrain.capture.convert.registry import conversion
from ortrain.capture.expansion import expand_unknown


class Layer(nn.Module):
    """A linear layer and a function of its result."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.fc(x))


class WeightNorm(nn.Module):
    """A linear layer whose weight is a direction times a length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc(x))


def einsum(x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bsd,btd->bst", x, x.tanh())


def written_result(x: torch.Tensor) -> torch.Tensor:
    """Write to a view of what an operator without a conversion made."""
    product = torch.einsum("bsd,btd->bst", x, x)
    product[:, 0].mul_(2)
    return product + product.sum()


def resized(x: torch.Tensor) -> torch.Tensor:
    size = (x.shape[1] + 1, 2 * x.shape[2])
    return F.interpolate(x[:, None], size, mode="bicubic", align_corners=False)


FUNCTIONS = {"einsum": einsum, "written": written_result, "bicubic": resized}


def check(module: nn.Module) -> None:
    """Compare steps of two sizes with PyTorch's; one graph serves both."""
    stock, ours = copy.deepcopy(module.double()), ORTModule(module)
    for size in ((2, 3, 4), (3, 5, 4)):
        x = torch.randn(size, dtype=torch.float64)
        expected, actual = stock(x), ours(x)
        torch.testing.assert_close(actual, expected)
        expected.square().sum().backward()
        actual.square().sum().backward()
        for own, other in zip(module.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)
    (record,) = ours.report().captures
    assert not record.fallback and not record.escapes


@pytest.mark.parametrize("name", FUNCTIONS)
def test_steps_are_those_of_pytorch_without_another_trace(name: str) -> None:
    with mock.patch.object(export, "run_decompositions") as again:
        check(Layer(FUNCTIONS[name]))
    again.assert_not_called()


def test_layers_of_normalized_weights() -> None:
    with mock.patch.object(export, "run_decompositions") as again:
        check(WeightNorm())
    again.assert_not_called()


def exported(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.export.ExportedProgram:
    axes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    return torch.export.export(Layer(function), (torch.randn(2, 3, 4),), dynamic_shapes=(axes,))


def known(target: object) -> bool:
    return conversion(target) is not None


def test_parts_keep_name_memory_and_layer() -> None:
    program = exported(einsum)
    (node,) = (n for n in program.graph.nodes if n.target is torch.ops.aten.einsum.default)
    name, value, layer = node.name, node.meta["val"], node.meta["nn_module_stack"]
    expand_unknown(program, known)
    program.graph.lint()
    (result,) = (n for n in program.graph.nodes if n.name == name)
    assert result.meta["val"] is value
    assert program.graph_signature.user_outputs == (name,)
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert torch.ops.aten.bmm.default in targets and all(map(known, targets))
    assert result.meta["nn_module_stack"] == layer
    x = torch.randn(5, 6, 4)
    torch.testing.assert_close(program.module()(x), Layer(einsum)(x))


def test_an_operator_stays_whole_where_a_part_has_no_conversion() -> None:
    program = exported(einsum)
    before = [n.target for n in program.graph.nodes]
    expand_unknown(
        program, lambda target: target is not torch.ops.aten.bmm.default and known(target)
    )
    assert [n.target for n in program.graph.nodes] == before


def test_an_operator_without_parts_stays() -> None:
    program = exported(lambda x: torch.special.bessel_j0(x))
    before = [n.target for n in program.graph.nodes]
    expand_unknown(program, known)
    assert [n.target for n in program.graph.nodes] == before


def test_under_autocast_the_whole_program_is_traced_again() -> None:
    ours = ORTModule(Layer(einsum))
    with (
        mock.patch.object(expansion, "_parts") as parts,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        ours(torch.randn(2, 3, 4))
    parts.assert_not_called()
