# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""An estimate decides which pieces run on the engine, and whether a module is cut at all."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from ortrain import ORTModule, piece_costs


@pytest.fixture(autouse=True)
def estimates(monkeypatch):
    monkeypatch.setenv("ORTRAIN_PIECES", "worthwhile")
    # The branch of these modules is to be a cut.
    monkeypatch.setattr("ortrain.known_branches.KnownBranches.may_help", lambda *_: False)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Cut(nn.Module):
    """Layers in front of a cut and behind it, `deep` of them each."""

    def __init__(self, deep, width=8, dropout=0.0):
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(width, width) for _ in range(deep))
        self.behind = nn.ModuleList(nn.Linear(width, width) for _ in range(deep))
        self.dropout = dropout

    def forward(self, x):
        for layer in self.before:
            x = nn.functional.dropout(torch.tanh(layer(x)), self.dropout, self.training)
        if x.sum() > 1e6:
            x = x / 2
        for layer in self.behind:
            x = torch.tanh(layer(x)) * 0.5
        return x


def train(module, ours, shape, steps=3):
    for _ in range(steps):
        x = torch.randn(shape)
        results = []
        for model in (module, ours):
            y = model(x)
            results.append((y, *torch.autograd.grad(y.square().sum(), model.parameters())))
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def wrapped(module):
    return ORTModule(copy.deepcopy(module))


@pytest.mark.since_torch(2, 12)
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_long_pieces_run_on_the_engine():
    module = Cut(24)
    ours = wrapped(module)
    train(module, ours, (4, 8))
    assert sum(record.native_nodes > 0 for record in ours.report().pieces) == 2


@pytest.mark.since_torch(2, 12)
def test_a_module_of_short_pieces_is_left_to_pytorch_and_says_so_once():
    module = Cut(1)
    ours = wrapped(module)
    with pytest.warns(RuntimeWarning, match="(?s)Cut runs in PyTorch.*too small to gain"):
        train(module, ours, (4, 8), steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(module, ours, (4, 8), steps=10)
    (record,) = ours.report().captures
    assert record.pieces == 0
    assert "too small to gain" in record.fallback


@pytest.mark.since_torch(2, 12)
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_pieces_without_gradients_are_weighed_on_their_own():
    module = Cut(24)
    ours = wrapped(module)
    x = torch.randn(4, 8)
    with torch.no_grad():  # engines take more there than they save
        for _ in range(3):
            torch.testing.assert_close(ours(x), module(x))
    train(module, ours, (4, 8))
    assert any(record.native_nodes for record in ours.report().pieces)


@pytest.mark.since_torch(2, 12)
def test_all_of_them_where_the_user_wants_it(monkeypatch):
    monkeypatch.setenv("ORTRAIN_PIECES", "all")
    module = Cut(1)
    ours = wrapped(module)
    with pytest.warns(RuntimeWarning, match="runs in pieces"):
        train(module, ours, (4, 8))
    assert sum(record.native_nodes > 0 for record in ours.report().pieces) == 2


def test_an_unknown_choice_is_refused(monkeypatch):
    monkeypatch.setenv("ORTRAIN_PIECES", "some")
    with pytest.raises(ValueError, match="ORTRAIN_PIECES=some, expected worthwhile or all"):
        piece_costs.Choice.current()


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_modules_that_are_cut_anew_at_every_call_are_left_to_pytorch():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, count):
            if x.sum() > 1e6:
                x = x / 2
            for k in range(count):
                x = torch.tanh(self.layer(x)) + k
            return x

    module = Growing()
    ours, x = ORTModule(module), torch.randn(4, 8)
    for count in range(40, 60):
        torch.testing.assert_close(ours(x, count), module(x, count))
    before = len(ours.report().pieces)
    for count in range(60, 70):
        torch.testing.assert_close(ours(x, count), module(x, count))
    assert len(ours.report().pieces) == before


def gain_of(function, *inputs):
    """Return the estimate of each piece that Dynamo makes of a function."""
    found = []

    def backend(piece, _):
        found.append(piece_costs.gain(piece))
        return piece.forward

    torch.compile(function, backend=backend)(*inputs)
    return found


def test_gain_grows_with_operators_and_falls_with_inputs():
    x = torch.randn(4, 8, requires_grad=True)

    def chain(x, count):
        for _ in range(count):
            x = torch.sigmoid(x)
        return x

    short, long = (gain_of(chain, x, count)[0] for count in (2, 60))
    assert short < 0 < long

    def added(*tensors):
        return sum(tensors)

    tensors = [torch.randn(4, 8, requires_grad=True) for _ in range(12)]
    few, many = gain_of(added, *tensors[:3])[0], gain_of(added, *tensors)[0]
    assert few < 0
    assert many < 0  # an addition saves about as much as its operand costs


def test_gain_counts_elements_of_what_the_engine_does_in_one_go():
    def masked(x):
        return nn.functional.dropout(x, 0.1, True)

    def unmasked(x):
        return nn.functional.dropout(x, 0.1, False) * 1

    small, large = (torch.randn(n, requires_grad=True) for n in (100, 1_000_000))
    assert gain_of(masked, small)[0] < 0 < gain_of(masked, large)[0]
    assert gain_of(unmasked, large)[0] < gain_of(masked, large)[0] / 10
