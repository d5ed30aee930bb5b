# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What ORTModule(verify=...) says of steps that differ from PyTorch: planted errors."""

import pytest
import torch
from torch import nn
from verified_models import Counting, batch, wrapped

import ortrain
from ortrain import ORTModule, VerificationError
from ortrain.capture import prepare
from ortrain.capture.convert import registry
from ortrain.entry import Entry
from ortrain.module_states import ModuleStates


def tanh_with_gradient_of_half(e, x):
    """Return tanh(x), whose gradient is that of x / 2."""
    half = e.node("Mul", x, e.scalar(0.5, x.dtype))
    apart = e.node("Sub", e.node("Tanh", x), half)
    return e.node("Add", e.node("StopGradient", apart, domain="ortrain"), half)


def tanh_too_large(e, x):
    return e.node("Mul", e.node("Tanh", x), e.scalar(1.2, x.dtype))


@pytest.fixture
def planted(monkeypatch):
    """Plant another conversion of torch.tanh."""
    registry.targets()  # so that all are loaded

    def plant(conversion):
        monkeypatch.setitem(registry._conversions, "aten.tanh.default", conversion)

    return plant


@pytest.mark.since_torch(2, 12)
@pytest.mark.filterwarnings("ignore:Counting runs in pieces")
def test_error_in_a_piece_is_found(planted):
    planted(tanh_too_large)
    model = wrapped("first", Counting)
    with pytest.raises(VerificationError, match="output #0"):
        model(torch.randn(2, 3))


def test_error_of_an_inner_layer_is_named(planted):
    planted(tanh_too_large)
    model = wrapped("first")
    with pytest.raises(VerificationError) as caught:
        model(*batch())
    error = caught.value
    assert isinstance(error, ortrain.OrtrainError)
    assert (error.layer, error.what, error.step) == ("blocks.1", "output #0", 1)
    assert 0.1 < error.difference < 1
    assert str(error).startswith(
        "Model, step 1: layer 'blocks.1' is the first that differs from PyTorch: output #0 by 0."
    )
    # The next normalization takes the factor out of everything but its statistics.
    assert "seen from outside, buffer 'blocks.2.norm.running_mean' differs by" in str(error)


def test_error_in_a_gradient_is_named(planted):
    planted(tanh_with_gradient_of_half)
    model = wrapped("first")
    made = model(*batch())
    with pytest.raises(VerificationError) as caught:
        made["loss"].backward()
    error = caught.value
    assert error.layer == "blocks.1"
    assert error.what in (
        "gradient of argument 'x'",
        "gradient of parameter 'blocks.1.linear.weight'",
    )
    assert all(p.grad is None for p in model.blocks[0].parameters())


def test_error_is_found_at_a_later_step_and_the_steps_between_are_left_alone(planted):
    model = wrapped("sampled")
    for _ in range(2):
        model(*batch())["loss"].backward()
    planted(tanh_too_large)
    model.eval()  # which is captured anew
    model(*batch())
    with pytest.raises(VerificationError, match="step 4: layer 'blocks.1' is the first"):
        model(*batch())


def test_missing_gradient_is_found(planted, monkeypatch):
    monkeypatch.setattr(prepare, "_missing_gradients", lambda captured, graph: {})  # who finds it
    planted(lambda e, x: e.node("StopGradient", e.node("Tanh", x), domain="ortrain"))
    model = wrapped("first")
    made = model(*batch())
    with pytest.raises(VerificationError, match="only PyTorch has one") as caught:
        made["loss"].backward()
    assert caught.value.layer == "blocks.1"


def test_wrong_buffer_is_found(monkeypatch):
    right = Entry.apply_updates

    def twice(self, targets, outputs):
        right(self, targets, outputs)
        if targets:
            targets[0].add_(0.01)

    monkeypatch.setattr(Entry, "apply_updates", twice)
    model = wrapped("first", lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    with pytest.raises(VerificationError) as caught:
        model(batch()[0])
    assert caught.value.layer == "1"
    assert caught.value.what == "buffer '1.running_mean'"
    assert abs(caught.value.difference - 0.01) < 1e-4


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)
        self.inner.scale = 2.0

    def forward(self, x):
        return self.outer(self.inner(x) * self.inner.scale)


def test_graph_out_of_date_is_told_apart(monkeypatch):
    model = wrapped(2, Scaled)
    model(torch.randn(2, 3)).sum().backward()
    engine = model._ortrain_engine
    look = ModuleStates.look

    def blind(self):
        return (self.tensors, False) if self is engine._states else look(self)

    monkeypatch.setattr(ModuleStates, "look", blind)
    model.inner.scale = 3.0
    with pytest.raises(
        VerificationError, match="its graph is out of date: captured anew it agrees"
    ):
        model(torch.randn(2, 3))


class Remembering(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.linear, self.count = nn.Linear(3, 3), count

    def forward(self, x):
        return self.linear(x) * self.count


def test_attributes_are_compared(monkeypatch):
    model = wrapped("first", lambda: Remembering(2))
    engine = model._ortrain_engine
    run = type(engine).run

    def forgetful(self, args, kwargs):
        result = run(self, args, kwargs)
        if self is engine:
            self.module.left_over = 7
        return result

    monkeypatch.setattr(type(engine), "run", forgetful)
    with pytest.raises(VerificationError, match="attribute '.*left_over'") as caught:
        model(torch.randn(2, 3))
    assert caught.value.difference == float("inf")
    assert model.module.left_over == 7  # as the engine's run left it


def test_not_a_number_is_equal_to_itself_and_to_nothing_else(planted):
    model = wrapped("first", lambda: nn.Sequential(nn.Tanh()))
    model(torch.tensor([1.0, float("nan"), float("inf")]))
    planted(lambda e, x: e.node("Div", e.node("Tanh", x), e.scalar(0.0, x.dtype)))
    model = wrapped("first", lambda: nn.Sequential(nn.Tanh()))
    with pytest.raises(VerificationError) as caught:
        model(torch.tensor([0.0, 1.0]))
    assert caught.value.difference == float("inf")
    assert caught.value.layer == "0"


def test_integers_are_compared_exactly(monkeypatch):
    registry.targets()
    right = registry._conversions["aten.argmax.default"]

    def next_one(e, *args, **kwargs):
        return e.node("Add", right(e, *args, **kwargs), e.scalar(1, torch.int64))

    class Best(nn.Module):
        def forward(self, x):
            return x.argmax(-1)

    assert ORTModule(Best(), verify="first")(torch.eye(3)).tolist() == [0, 1, 2]
    monkeypatch.setitem(registry._conversions, "aten.argmax.default", next_one)
    with pytest.raises(VerificationError, match="1 on the engine, 0 in PyTorch"):
        ORTModule(Best(), verify="first")(torch.eye(3))
