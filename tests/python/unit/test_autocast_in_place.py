# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The casts of autocast without another trace: the graph is that of another trace, and means what PyTorch does."""

from __future__ import annotations

import collections
import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule
from ortrain.capture import export
from ortrain.capture.prepare import prepare
from ortrain.capture.signature import CallSignature
from tests.python.processor import runs_lstm_in_16_bits

Function = Callable[["Layers", torch.Tensor], torch.Tensor]


class Layers(nn.Module):
    """Some layers, and a function of them and the input."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.LayerNorm(8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.cell = nn.LSTMCell(8, 8)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def bf16(**options: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **options)


def in_regions(m: Layers, x: torch.Tensor) -> torch.Tensor:
    with bf16():
        y = m.fc(x)
        with bf16(enabled=False):
            z = m.head(y.float())
            with torch.autocast("cpu", torch.float16):
                z = z + x @ x.mT  # no weight, of which PyTorch keeps the cast for all types
        y = y + m.head(z)
    return y + z


def in_regions_of_both_kinds(m: Layers, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), bf16(enabled=False):
        angles = (x.float() @ x.float().mT).cos()
    return m.fc(x) + angles.sum(-1, keepdim=True).to(x.dtype)


def with_writes(m: Layers, x: torch.Tensor) -> torch.Tensor:
    y = m.fc(x)
    y.mul_(2).add_(1)
    y[:, 0].add_(1)
    return y + m.norm(y.mT).mT


def products_in_place(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(x.shape[0], 8, 8).baddbmm_(x, x.mT) + m.fc(x)


def labels(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1).argmax(-1)


# Of these no program is traced another time.
IN_PLACE: dict[str, Function] = {
    "layers": lambda m, x: m.head(F.gelu(m.scale(m.fc(x)))),
    "regions": in_regions,
    "regions_without_gradient": in_regions_of_both_kinds,
    "writes": with_writes,
    "products_in_place": products_in_place,
    "one_weight_twice": lambda m, x: m.fc(x) + F.linear(x, m.fc.weight) + x @ m.fc.weight,
    "attention": lambda m, x: F.scaled_dot_product_attention(m.fc(x), x, x, is_causal=True),
    "einsum": lambda m, x: torch.einsum("bij,bkj->bik", m.fc(x), x),
    "chain": lambda m, x: torch.linalg.multi_dot([x[0], m.fc.weight, m.head.weight]),
    "promoted": lambda m, x: torch.cat([m.fc(x), x], -1) + torch.stack([x, m.fc(x)], -1).flatten(2),
    "square_loss": lambda m, x: F.mse_loss(m.fc(x), x),
    "entropy": lambda m, x: F.cross_entropy(m.fc(x).flatten(0, 1), labels(x)),
    "entropy_per_label": lambda m, x: F.cross_entropy(
        m.fc(x).flatten(0, 1), labels(x), reduction="none"
    ),
    "logits": lambda m, x: F.binary_cross_entropy_with_logits(m.fc(x), x.sigmoid()),
    "lstm_of_two_types": lambda m, x: m.head(m.lstm(x)[0]),
    "cell": lambda m, x: m.cell(x[:, 0])[0],
}
# Of these one is: what stands for the results in the export has other dtypes, or parts write.
TRACED: dict[str, Function] = {
    "hidden_product": lambda m, x: torch.inner(x, m.fc.weight) + m.fc(x),
    "hidden_writes": lambda m, x: m.fc(F.instance_norm(x)),
}
CASES = {**IN_PLACE, **TRACED}


@contextlib.contextmanager
def traces() -> Iterator[mock.Mock]:
    decompose = torch.export.ExportedProgram.run_decompositions
    with mock.patch.object(
        torch.export.ExportedProgram, "run_decompositions", autospec=True, side_effect=decompose
    ) as traced:
        yield traced


def graph_of(module: nn.Module, x: torch.Tensor) -> tuple[collections.Counter[str], list[str]]:
    """Return the operators of a graph with their attributes and types, and its outputs."""
    call = CallSignature(module.forward).flatten((x,), {})
    text = prepare(module, call, (x,), {}, {}).graph.text()
    lines = re.findall(
        r'^  .*? = (\S+(?: <.*?>)?) \(.*\)(?: @"(.*?)/[^/"]*")?  # (.*)$', text, re.M
    )
    return collections.Counter(map(str, lines)), re.findall(r"as (\S+)\)", text)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_graph_is_that_of_another_trace(name: str, dtype: torch.dtype | None) -> None:
    module, x = Layers(CASES[name]), torch.randn(3, 8, 8)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        made = graph_of(copy.deepcopy(module), x)
        with mock.patch.object(export, "casts_in_place", lambda *_: False):
            traced = graph_of(copy.deepcopy(module), x)
    assert made == traced


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_pytorch(name: str) -> None:
    if name == "lstm_of_two_types" and not runs_lstm_in_16_bits():
        pytest.skip("PyTorch raises on this processor")
    plain = Layers(CASES[name])
    wrapped = ORTModule(copy.deepcopy(plain))
    with traces() as traced:
        for rows in (3, 5):
            x = torch.randn(rows, 8, 8)
            with bf16():
                expected, actual = plain(x), wrapped(x)
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, atol=0.06, rtol=0.06)
            expected.float().mean().backward()
            actual.float().mean().backward()
    assert traced.called == (name in TRACED)
    assert wrapped.report().native_share == 1.0
    for mine, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=0.02, rtol=0.06)


def test_a_write_is_not_cast() -> None:
    a, b = torch.randn(2, 8, 8), torch.randn(2, 8, 8)
    wrapped = ORTModule(Layers(lambda m, x: torch.zeros_like(x).baddbmm_(x, b)))
    with bf16():
        actual = wrapped(a)
    torch.testing.assert_close(actual, a @ b)


@pytest.mark.parametrize("autocast", [False, True])
def test_operators_that_ask_for_sizes_keep_sizes_free(autocast: bool) -> None:
    wrapped = ORTModule(Layers(IN_PLACE["chain"]))
    for rows in (3, 5):
        with bf16(enabled=autocast), traces() as traced:
            wrapped(torch.randn(rows, 8, 8))
        assert not traced.called
    assert len(wrapped.report().captures) == 1


def test_operands_that_stay_as_they_are_need_no_trace() -> None:
    wrapped = ORTModule(Layers(IN_PLACE["square_loss"]))
    with traces() as traced:
        wrapped(torch.randn(3, 8, 8))
    assert not traced.called


def test_casts_stand_in_the_checkpoint_of_their_operator() -> None:
    module = Layers(lambda m, x: m.head(checkpoint(m.fc, x, use_reentrant=False)))
    marks = []
    with bf16():
        captured = export.capture(module, (torch.randn(2, 8, 8),), known=lambda _: True)
    for node in captured.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten._to_copy.default
    ):
        marks.append(
            (node.next.target, bool(node.meta.get("custom", {}).get("ortrain_checkpoint")))
        )
    assert sum(marked for _, marked in marks) == 3
