# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What ORTTrainer's graphs depend on, changed between its steps: inside of the module, outside, and in the loss."""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.reference
import pytest
import torch
from torch import nn

from ortrain import ORTTrainer, optim
from ortrain.capture.errors import CaptureError
from ortrain.errors import UnsupportedError

SCALE = 1.0
TABLE = torch.ones(4)
SETTINGS = types.SimpleNamespace(scale=1.0, table=torch.ones(4))
DESCRIPTION = {
    "inputs": [("x", ["rows", 4]), ("target", ["rows", 4])],
    "outputs": [("loss", [], True), ("result", ["rows", 4])],
}


def doubled_or_not(x: torch.Tensor) -> torch.Tensor:
    return x


class Net(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = 1.0
        self.table = torch.ones(4)
        self.teachers = [torch.ones(4)]
        self.numbers = {"a": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = doubled_or_not(self.norm(self.linear(x))) * self.table * self.teachers[0] * TABLE
        h = h * self.scale * self.numbers["a"] * self.factor * SCALE * SETTINGS.scale
        return h * getattr(self, "late", 1.0)


class Loss:
    """A callable that is no layer."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.table = torch.ones(4)

    def __call__(self, result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((result - target).square() * self.table).mean() * self.weight


class LossLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0
        self.register_buffer("table", torch.ones(4))

    forward = Loss.__call__


def closing_loss() -> Callable[..., torch.Tensor]:
    held = types.SimpleNamespace(weight=1.0, table=torch.ones(4))

    def loss(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((result - target).square() * held.table).mean() * held.weight

    loss.held = held  # type: ignore[attr-defined]
    return loss


def set_global(name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda net, loss: globals().__setitem__(name, value)


def of_loss(loss: Any) -> Any:
    return getattr(loss, "held", loss)


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "a number": lambda net, loss: setattr(net, "scale", 2.0),
    "a number in a dict": lambda net, loss: net.numbers.update(a=2.0),
    "a tensor replaced": lambda net, loss: setattr(net, "table", torch.full((4,), 2.0)),
    "a tensor in place": lambda net, loss: net.table.mul_(2),
    "a tensor by data": lambda net, loss: net.table.data.mul_(2),
    "a tensor by numpy": lambda net, loss: np.multiply(net.table.numpy(), 2, net.table.numpy()),
    "a tensor's storage": lambda net, loss: setattr(net.table, "data", torch.full((4,), 2.0)),
    "a tensor in a list": lambda net, loss: net.teachers[0].mul_(2),
    "a tensor in a list replaced": lambda net, loss: net.teachers.__setitem__(0, TABLE * 2),
    "of the class": lambda net, loss: setattr(type(net), "factor", 2.0),
    "what its class did not have": lambda net, loss: setattr(type(net), "late", 2.0),
    "a global number": set_global("SCALE", 2.0),
    "a global tensor": lambda net, loss: TABLE.mul_(2),
    "a global tensor by data": lambda net, loss: TABLE.data.mul_(2),
    "of a global object": lambda net, loss: setattr(SETTINGS, "scale", 2.0),
    "a function": set_global("doubled_or_not", lambda x: x * 2),
    "a layer": lambda net, loss: setattr(net.norm, "eps", 1.0),
    "a layer's mode": lambda net, loss: net.norm.eval(),
    "a number of the loss": lambda net, loss: setattr(of_loss(loss), "weight", 2.0),
    "a tensor of the loss": lambda net, loss: of_loss(loss).table.mul_(2),
    "a tensor of the loss by data": lambda net, loss: of_loss(loss).table.data.mul_(2),
    "a tensor of the loss replaced": lambda net, loss: setattr(
        of_loss(loss), "table", torch.full((4,), 2.0)
    ),
}
GLOBALS = ("SCALE", "doubled_or_not")


def all_as_before() -> None:
    TABLE.fill_(1.0)
    Net.factor = SETTINGS.scale = 1.0
    if "late" in vars(Net):
        del Net.late  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    before = {name: globals()[name] for name in GLOBALS}
    yield
    globals().update(before)
    all_as_before()


def losses_of(change: Any, make_loss: Any, *, ours: bool) -> list[float]:
    torch.manual_seed(0)
    net, loss = Net(), make_loss()
    if ours:
        trainer = ORTTrainer(net, DESCRIPTION, optim.SGDConfig(lr=0.1), loss)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for step in range(4):
        if step == 2:
            change(net, loss)
        x, target = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step))
        if ours:
            losses.append(trainer.train_step(x, target)[0].item())
            continue
        optimizer.zero_grad()
        value = loss(net(x), target)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.sampled(14)
@pytest.mark.parametrize(
    ("name", "make_loss"),
    [(name, Loss) for name in CHANGES]
    + [(name, make) for name in CHANGES if "loss" in name for make in (LossLayer, closing_loss)],
)
def test_what_is_changed_between_steps_counts(name: str, make_loss: Any) -> None:
    expected = losses_of(CHANGES[name], make_loss, ours=False)
    for each in GLOBALS:
        globals()[each] = 1.0 if each == "SCALE" else doubled_or_not_before
    all_as_before()
    assert losses_of(CHANGES[name], make_loss, ours=True) == pytest.approx(expected, rel=1e-4)


doubled_or_not_before = doubled_or_not


def test_files_keep_what_is_outside_as_it_is(tmp_path: Any) -> None:
    torch.manual_seed(0)
    net = Net()
    trainer = ORTTrainer(net, DESCRIPTION, optim.SGDConfig(lr=0.1), Loss())
    x, target = torch.randn(3, 4), torch.randn(3, 4)
    trainer.train_step(x, target)
    TABLE.mul_(3)
    trainer.save_as_onnx(tmp_path / "net.onnx", include_loss=False)
    trainer.save_as_onnx(tmp_path / "step.onnx", training=True)
    model = onnx.load(str(tmp_path / "net.onnx"))
    assert [i.name for i in model.graph.input] == ["x"]
    session = onnx.reference.ReferenceEvaluator(model)
    (result,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), net.eval()(x).detach())
    # What is outside is no part of the state.
    assert trainer.state_dict(pytorch_format=True).keys() == net.state_dict().keys()
    trainer.save_checkpoint(tmp_path / "kept")
    other = ORTTrainer(Net(), DESCRIPTION, optim.SGDConfig(lr=0.1), Loss())
    other.load_checkpoint(tmp_path / "kept", strict=True)
    assert torch.equal(other.train_step(x, target)[0], trainer.train_step(x, target)[0])


class Writes(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table.mul_(0.5)
        return self.linear(x) * self.table


class Draws(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * random.random()


class Counts(Net):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class OtherAtFirst(Net):
    made = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.made is None:
            self.made = torch.ones(4)
            return self.linear(x)
        return self.linear(x) * 2 * self.made


class MakesNorm(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.late = nn.BatchNorm1d(4)
        return self.late(self.linear(x))


class MakesNoise(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "noise"):
            self.noise = torch.rand(4)
        return self.linear(x) + self.noise


class MakesAndCounts(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "calls"):
            self.calls = 0
        self.calls += 1
        return self.linear(x)


@pytest.mark.parametrize("kind", [MakesNoise, MakesAndCounts, Writes, Draws, Counts, OtherAtFirst])
def test_what_a_graph_would_lose_runs_in_pytorch(kind: type[Net]) -> None:
    torch.manual_seed(0)
    net = kind()
    stock = copy.deepcopy(net)
    trainer = ORTTrainer(net, DESCRIPTION, optim.SGDConfig(lr=0.1), Loss())
    optimizer = torch.optim.SGD(stock.parameters(), 0.1)
    for step in range(3):
        x, target = torch.randn(2, 3, 4)
        for seeded in (random.seed, torch.manual_seed):
            seeded(step)
        loss = trainer.train_step(x, target)[0]
        for seeded in (random.seed, torch.manual_seed):
            seeded(step)
        optimizer.zero_grad()
        expected = Loss()(stock(x), target)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(net.linear.weight, stock.linear.weight)
    assert getattr(net, "calls", 0) == getattr(stock, "calls", 0)


def test_layers_that_a_forward_makes_are_trained() -> None:
    net = MakesNorm()
    trainer = ORTTrainer(net, DESCRIPTION, optim.SGDConfig(lr=0.1), Loss())
    for _ in range(2):
        trainer.train_step(*torch.randn(2, 3, 4))
    assert net.late.num_batches_tracked == 2
    assert not torch.equal(net.late.weight, torch.ones(4))
    assert "late.weight" in trainer.state_dict(pytorch_format=True)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_refused(hook: str) -> None:
    net = Net()
    trainer = ORTTrainer(net, DESCRIPTION, optim.SGDConfig(lr=0.1), Loss())
    call = torch.randn(3, 4), torch.randn(3, 4)
    trainer.train_step(*call)
    handle = getattr(net.linear.weight, hook)(lambda gradient: None)
    with pytest.raises(UnsupportedError, match="'linear.weight' has hooks on its gradient"):
        trainer.train_step(*call)
    handle.remove()
    trainer.train_step(*call)


def test_gradients_outside_of_the_module_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(4))

    def loss(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((result - target).square() * weight.exp() + weight).mean()

    trainer = ORTTrainer(Net(), DESCRIPTION, optim.SGDConfig(lr=0.1), loss)
    with pytest.raises(CaptureError, match="lies outside of the module and wants a gradient"):
        trainer.train_step(torch.randn(3, 4), torch.randn(3, 4))
    teacher = Net()

    def distilled(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = teacher.linear(target)
        return (result - goal).square().mean()

    trainer = ORTTrainer(Net(), DESCRIPTION, optim.SGDConfig(lr=0.1), distilled)
    trainer.train_step(torch.randn(3, 4), torch.randn(3, 4))


def test_graphs_of_a_state_stay(caplog: pytest.LogCaptureFixture) -> None:
    net, loss = Net(), Loss()
    trainer = ORTTrainer(net, DESCRIPTION, optim.SGDConfig(lr=0.1), loss)
    call = torch.randn(3, 4), torch.randn(3, 4)
    made = []
    for _ in range(3):
        net.train()
        trainer.train_step(*call)
        net.eval()
        trainer.eval_step(*call)
        for factor in (1.0, 2.0):
            loss.weight = factor
            net.train()
            trainer.train_step(*call)
        loss.weight = 1.0
        made.append([id(each) for each in trainer.engine._training])
    assert len(made[2]) == 2 and set(made[0]) == set(made[2])
    assert not any("different states" in r.getMessage() for r in caplog.records)
    for step in range(6):
        loss.weight = 1.0 / (step + 3)
        trainer.train_step(*call)
    assert sum("different states" in r.getMessage() for r in caplog.records) == 1
