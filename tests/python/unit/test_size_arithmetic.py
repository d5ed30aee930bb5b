# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on symbolic sizes that is done once gives what PyTorch's gives each time."""

from __future__ import annotations

import operator
import random
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ortrain.capture import export, size_arithmetic
from ortrain.capture.size_arithmetic import sizes_computed_once

NUMBERS: tuple[Callable[[Any, Any], Any], ...] = (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod),
    *(torch.sym_max, torch.sym_min),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
)
FLAGS: tuple[Callable[[Any, Any], Any], ...] = (operator.and_, operator.or_)


def each_time() -> Any:
    """Let all arithmetic be PyTorch's."""
    return mock.patch.object(size_arithmetic, "_cheaper_methods", lambda *_: {})


def sizes_of(*shape: int) -> list[Any]:
    """Return the sizes of a tensor of a trace, symbols all."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    return list(mode.from_tensor(torch.empty(shape), symbolic_context=context).shape)


def told(number: Any) -> tuple[Any, ...]:
    """Return all that is known of a number of a trace."""
    node = getattr(number, "node", None)
    if node is None:
        return type(number), number
    kind = type(number), node.pytype, type(node.hint)
    return *kind, str(node.expr), node.hint, node.constant, node._optimized_summation


def random_numbers(seed: int, steps: int = 60) -> list[tuple[Any, ...]]:
    """Compute from sizes and numbers at random, each of it twice, while conditions come up in between."""
    draw = random.Random(seed)
    numbers: list[Any] = [*sizes_of(4, 6, 6, 15), 1, 2, 3]
    flags: list[Any] = [numbers[0] < 5]
    results: list[tuple[Any, ...]] = []
    for step in range(steps):
        pool, functions = (flags, FLAGS) if draw.random() < 0.2 else (numbers, NUMBERS)
        function, left, right = draw.choice(functions), draw.choice(pool), draw.choice(pool)
        try:
            first, again = (function(left, right) for _ in range(2))
        except Exception as error:
            results.append((type(error),))
            continue
        results += [told(first), told(again)]
        if isinstance(first, torch.SymInt):
            if len(str(first.node.expr)) < 60:
                numbers.append(first)
        elif isinstance(first, torch.SymBool):
            flags.append(first)
            if step % 10 == 9:
                results.append((bool(first),))  # holds from now on
    return results


@pytest.mark.parametrize("seed", range(40))
def test_random_arithmetic_is_pytorchs(seed: int) -> None:
    expected = random_numbers(seed)
    counted: list[str] = []
    with sizes_computed_once(lambda formula: counted.append(str(formula))):
        actual = random_numbers(seed)
    assert actual == expected
    of_each: list[str] = []
    with each_time(), sizes_computed_once(lambda formula: of_each.append(str(formula))):
        random_numbers(seed)
    assert counted == of_each


def test_a_product_is_computed_once() -> None:
    computed = []
    product = SymNode._mul

    def multiply(left: SymNode, right: SymNode) -> SymNode:
        computed.append((left.expr, right.expr))
        return product(left, right)

    with mock.patch.object(SymNode, "_mul", multiply), sizes_computed_once(lambda _: None):
        a, b = sizes_of(3, 5)
        computed.clear()
        products = [a * b for _ in range(5)]
        assert len(computed) == 1
        assert len({id(p.node) for p in products}) == 5  # each may be the size of another tensor
        _ = b * a, a * a, a * b
        assert len(computed) == 3
    assert SymNode._mul is product


def test_what_is_known_of_symbols_later_counts() -> None:
    with sizes_computed_once(lambda _: None):
        a, b = sizes_of(5, 5)
        before = told(a * b), told(a == b)
        assert bool(a == b)
        after = told(a * b), told(a == b)
    a, b = sizes_of(5, 5)
    assert (told(a * b), told(a == b)) == before
    assert bool(a == b)
    assert (told(a * b), told(a == b)) == after != before


def test_a_hint_is_that_of_its_own_operands() -> None:
    """Traces of one thread have symbols by the same names, each with its own numbers."""
    with sizes_computed_once(lambda _: None):
        for shape in ((3, 5), (3, 5), (4, 7)):
            a, b = sizes_of(*shape)
            for _ in range(2):
                assert (a * b).node.hint == shape[0] * shape[1]
                assert (a * b).node.shape_env is a.node.shape_env


def test_arithmetic_that_goes_into_a_graph_goes_there_each_time() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        return x.new_full((2 * (rows + 1),), rows * columns) + x.new_full((2 * (rows + 1),), 1.0)

    def graph() -> str:
        return make_fx(function, tracing_mode="symbolic")(torch.randn(3, 5)).code

    expected = graph()
    with sizes_computed_once(lambda _: None):
        assert graph() == expected
        assert graph() == expected
    assert "sym_size" in expected and "mul" in expected


def test_other_threads_are_left_alone() -> None:
    counted: list[Any] = []
    results: list[Any] = []

    def compute() -> None:
        a, b = sizes_of(3, 5)
        results.extend(told(a * b) for _ in range(2))

    with sizes_computed_once(counted.append):
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        assert counted == [] and len(set(results)) == 1
        a, b = sizes_of(3, 5)
        assert told(a * b) == results[0] and counted


def test_a_number_that_pytorch_tells_a_node_later_is_that_nodes_alone() -> None:
    with sizes_computed_once(lambda _: None):
        size = sizes_of(5, 6)[0]
        unknown = size.node.shape_env.create_unbacked_symint()
        torch._check(unknown == size)
        first = unknown + 1
        first.node._hint = 6  # as guarding_hint_or_throw() does
        assert (unknown + 1).node._hint is None


def test_numbers_that_are_not_known_come_up_where_something_is() -> None:
    """A node whose number nobody knows asks for its formula while it is made."""
    with sizes_computed_once(lambda _: None):
        a, b = sizes_of(5, 5)
        assert bool(a == b)
        unknown = a.node.shape_env.create_unbacked_symint()
        assert str((unknown * a).node.expr) == str((unknown * b).node.expr)
        assert a.node.shape_env.create_unbacked_symbool().node.hint is None


class Found(nn.Module):
    """A number that depends on values, once sizes are known to be equal."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        z = x + y
        found = z[w > 0]
        return z.sum() * found.shape[0] + found.sum() * x.shape[0]


class Patches(nn.Module):
    """Windows, views and attention, whose sizes are quotients and products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 8, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        y = self.norm(x.flatten(2).transpose(1, 2))
        y = y + self.attention(y, y, y, need_weights=False)[0]
        y = y.reshape(y.shape[0], 8, -1).reshape(*x.shape)
        return torch.cat([y, x], 1)[:, :, : x.shape[2] // 2 + 1]


class Ragged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split(2, dim=1)
        if x.shape[1] % 2:
            return torch.stack([p.sum(1) for p in parts], 1)
        return torch.cat(parts[::-1], 1) * x.shape[0]


@pytest.mark.parametrize(
    ("module", "shapes"),
    [
        *((Patches(), [(2, 2, 12, 10)]), (Ragged(), [(2, 6)]), (Ragged(), [(2, 5)])),
        (Found(), [(5, 3), (5, 3), (5,)]),
    ],
)
def test_graphs_and_their_conditions_are_those_of_pytorchs_arithmetic(
    module: nn.Module, shapes: list[tuple[int, ...]]
) -> None:
    def captured() -> tuple[Any, ...]:
        found = export.capture(module, tuple(map(torch.randn, shapes)), known=lambda _: True)
        values = [n.meta.get("val") for n in found.graph_module.graph.nodes]
        metas = [(str(v.shape), str(v.stride())) for v in values if isinstance(v, torch.Tensor)]
        return found.graph_module.code, metas, found.guards.conditions, found.guards.text

    with each_time():
        expected = captured()
    assert captured() == expected
