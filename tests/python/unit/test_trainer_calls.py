# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainer: how a call is made, where its arguments lie, and what PyTorch is set to, are as in PyTorch."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ortrain import CaptureError, ORTTrainer, optim

DESCRIPTION = {
    "inputs": [("x", ["batch", 4]), ("y", ["batch", 4])],
    "outputs": [("loss", [], True), ("hidden", ["batch", 3])],
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.linear(x)) * torch.tanh(self.linear(y))
        return hidden.float().square().mean(), hidden.float()


class Asks(Layer):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return super().forward(x if x.is_contiguous() else 2 * x, y * y.stride(0))


class Writes(Layer):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        x.mul_(2)
        return super().forward(x, y)


class AsksForSettings(Layer):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        twice = torch.are_deterministic_algorithms_enabled() or torch.is_autocast_enabled("cpu")
        return super().forward(x * 2 if twice else x, y + (torch.arange(4) / 3).float())


class InPieces(Writes):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        if x.sum() > 1e6:
            x = -x
        return super().forward(x, y)


class Pair:
    """A trainer, and the same module in PyTorch."""

    def __init__(self, kind: type[nn.Module]) -> None:
        torch.manual_seed(0)
        module = kind()
        self.plain = copy.deepcopy(module)
        self.trainer = ORTTrainer(module, DESCRIPTION, optim.SGDConfig(lr=0.1))
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)

    def step(
        self, make: Callable[[], tuple[torch.Tensor, torch.Tensor]], tolerance: float = 1e-5
    ) -> None:
        """Compare a step of arguments that are made anew for each side."""
        given = make()
        before = [tensor.clone() for tensor in given]
        results = self.trainer.train_step(*given)
        assert all(map(torch.equal, given, before))
        self.optimizer.zero_grad()
        loss, hidden = self.plain(*make())
        loss.backward()
        self.optimizer.step()
        near = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(results[0], loss.detach(), **near)
        torch.testing.assert_close(results[1], hidden.detach(), **near)
        parameters = dict(self.trainer.model.named_parameters())
        for name, parameter in self.plain.named_parameters():
            torch.testing.assert_close(parameters[name], parameter, **near)


def placed(draw: random.Random) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return what makes two arguments of three rows in one memory, drawn anew at each call and equal."""
    width, begins = draw.randint(4, 6), [draw.randrange(3) for _ in range(2)]
    columns = [draw.randint(0, width - 4) for _ in range(2)]
    apart = [draw.random() < 0.4 for _ in range(2)]
    seed = draw.randrange(1000)

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.randn(
            5, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
        )
        views = [memory[b : b + 3, c : c + 4] for b, c in zip(begins, columns, strict=True)]
        x, y = (view.clone() if alone else view for view, alone in zip(views, apart, strict=True))
        return x, y

    return make


@pytest.mark.parametrize("kind", [Layer, Asks, Writes, InPieces])
@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
def test_arguments_may_lie_anywhere(kind: type[nn.Module]) -> None:
    draw, pair = random.Random(3), Pair(kind)
    for _ in range(12):
        pair.step(placed(draw))


def test_calls_that_differ_in_memory_leave_the_others_their_graph() -> None:
    pair = Pair(Asks)
    pair.step(lambda: (torch.ones(3, 4), torch.ones(3, 4)))
    with pytest.warns(RuntimeWarning, match="argument that has gaps"):
        pair.step(lambda: (torch.ones(3, 6)[:, :4], torch.ones(3, 4)))
    pair.step(lambda: (torch.ones(7, 1, 4)[:, 0], torch.ones(7, 4)))
    native = [record for record in pair.trainer.report().captures if "optimizer" in record.reason]
    assert len(native) == 1  # of both sizes


def test_strict_trainers_refuse_what_no_graph_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    trainer = ORTTrainer(Asks(), DESCRIPTION, optim.SGDConfig(lr=0.1))
    trainer.train_step(torch.ones(3, 4), torch.ones(3, 4))
    with pytest.raises(CaptureError, match="memory of an argument that has gaps"):
        trainer.train_step(torch.ones(3, 6)[:, :4], torch.ones(3, 4))
    writing = ORTTrainer(Writes(), DESCRIPTION, optim.SGDConfig(lr=0.1))
    writing.train_step(torch.ones(3, 4), torch.ones(3, 4))
    both = torch.ones(4, 4)
    with pytest.raises(CaptureError, match="compiled_fn|memory another tensor lies"):
        writing.train_step(both[:3], both[1:])


class Doubling(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is nn.functional.linear else result


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS = {
    "function mode": Doubling,
    "deterministic": deterministic,
    "default dtype": float64,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("kind", [Layer, AsksForSettings, InPieces])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
def test_settings_are_those_of_the_call(kind: type[nn.Module], setting: str) -> None:
    pair = Pair(kind)
    arguments = placed(random.Random(5))
    tolerance = 2e-3 if setting == "autocast" else 1e-5
    for _ in range(2):
        pair.step(arguments, tolerance)
        with SETTINGS[setting]():
            pair.step(arguments, tolerance)


@pytest.mark.parametrize("kind", [Layer, InPieces])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
def test_a_step_trains_in_any_mode_of_gradients(kind: type[nn.Module], mode: Any) -> None:
    pair, inside = Pair(kind), Pair(kind)
    with mode():
        given = placed(random.Random(7))()
        first = [inside.trainer.train_step(*given)[0] for _ in range(3)]
        evaluated = inside.trainer.eval_step(*given)[0]
    given = tuple(tensor.clone() for tensor in given)
    expected = [pair.trainer.train_step(*given)[0] for _ in range(3)]
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(evaluated, pair.trainer.eval_step(*given)[0])
