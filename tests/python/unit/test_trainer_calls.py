# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainer: how a call is made, where its arguments lie, and what PyTorch is set to, are as in PyTorch."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ortrain import CaptureError, ORTTrainer, ORTTrainerOptions, UnsupportedError, optim
from ortrain.capture.prepare import prepare
from ortrain.trainer import sources

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


@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
@pytest.mark.parametrize("step", ["train_step", "eval_step"])
def test_calls_that_differ_in_memory_are_not_captured_over_and_over(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    made = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(sources, "prepare", counted)
    pair = Pair(Asks)
    for size in (3, 3, 5, 3, 5):
        getattr(pair.trainer, step)(torch.ones(size, 6)[:, :4], torch.ones(size, 4))
    assert len(made) == 1


def test_strict_trainers_refuse_what_no_graph_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    trainer = ORTTrainer(Asks(), DESCRIPTION, optim.SGDConfig(lr=0.1))
    trainer.train_step(torch.ones(3, 4), torch.ones(3, 4))
    with pytest.raises(CaptureError, match="memory of an argument that has gaps"):
        trainer.train_step(torch.ones(3, 6)[:, :4], torch.ones(3, 4))
    writing = ORTTrainer(Writes(), DESCRIPTION, optim.SGDConfig(lr=0.1))
    both = torch.ones(4, 4)
    with pytest.raises(CaptureError, match="memory another tensor lies"):
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


class Single(nn.Module):
    """Of which the forward of one input is to be given."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("bank", torch.zeros(5, 4))
        self.register_buffer("mean", torch.zeros(()))
        self.computes = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.computes(self, x)


def loss_of(module: Single, x: torch.Tensor) -> torch.Tensor:
    return module.linear(x).square().mean()


def branching(compute: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any, torch.Tensor], Any]:
    """Return a forward that no graph holds whole."""

    def forward(module: Any, x: torch.Tensor) -> Any:
        return compute(module, -x if x.sum() > 1e6 else x)

    return forward


def trained(
    forward: Callable[[Any, torch.Tensor], Any], *outputs: tuple[str, list[Any]], **options: Any
) -> tuple[ORTTrainer, Single]:
    torch.manual_seed(0)
    module = Single(forward)
    plain = copy.deepcopy(module)
    description = {"inputs": [("x", ["batch", 4])], "outputs": [("loss", [], True), *outputs]}
    made = ORTTrainerOptions(options) if options else None
    return ORTTrainer(module, description, optim.SGDConfig(lr=0.1), options=made), plain


def own_loss(module: Single, x: torch.Tensor) -> torch.Tensor:
    """Return the loss of a step by SGD, which is made."""
    result = module(x)
    loss = result if isinstance(result, torch.Tensor) else result["loss"]
    loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return loss.detach()


@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
@pytest.mark.parametrize("order", [(4, 0, 3), (0, 4, 0)])
def test_batches_of_nothing(order: tuple[int, ...]) -> None:
    def forward(module: Single, x: torch.Tensor) -> torch.Tensor:
        return loss_of(module, x) if x.shape[0] else 7 * module.linear.weight.square().mean()

    trainer, plain = trained(forward)
    for size in order:
        x = torch.ones(size, 4)
        torch.testing.assert_close(trainer.train_step(x), own_loss(plain, x))
        torch.testing.assert_close(trainer.eval_step(x), plain(x).detach())


@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
def test_extremes_of_nothing_are_refused() -> None:
    trainer, _ = trained(lambda m, x: m.linear(x).amax(0).mean())
    trainer.train_step(torch.ones(4, 4))
    with pytest.raises(IndexError, match="non-zero size"):
        trainer.train_step(torch.ones(0, 4))


@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
def test_encoders_that_leave_out_padding(tmp_path: Path) -> None:
    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.encoder(x, src_key_padding_mask=mask)
            return hidden.square().mean(), hidden

    description = {
        "inputs": [("x", [2, 4, 8]), ("mask", [2, 4])],
        "outputs": [("loss", [], True), ("hidden", [2, 4, 8])],
    }
    module = Encoding()
    trainer = ORTTrainer(module, description, optim.SGDConfig(lr=0.1))
    x, mask = torch.randn(2, 4, 8), torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]).bool()
    found = trainer.eval_step(x, mask)
    trainer.save_as_onnx(tmp_path / "encoder.onnx")
    module.eval()
    with torch.no_grad():
        torch.testing.assert_close(tuple(found), module(x, mask))


def test_hooks_on_the_module_get_its_inputs() -> None:
    def double(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(2 * a for a in args)

    def add(module: nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> Any:
        return result + sum(a.sum() for a in args)

    for register, hook in (("register_forward_pre_hook", double), ("register_forward_hook", add)):
        module = Single(loss_of)
        getattr(module, register)(hook)
        plain = copy.deepcopy(module)
        description = {"inputs": [("x", ["batch", 4])], "outputs": [("loss", [], True)]}
        trainer = ORTTrainer(module, description, optim.SGDConfig(lr=0.1))
        x = torch.ones(2, 4)
        torch.testing.assert_close(trainer.train_step(x), own_loss(plain, x))


def test_forwards_and_hooks_that_take_names() -> None:
    def by_name(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(self: nn.Module, **given: torch.Tensor) -> Any:
            return forward(self, **given)

        return call

    class Named(Single):
        @by_name
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return loss_of(self, x)

    def double(module: nn.Module, args: Any, kwargs: dict[str, torch.Tensor]) -> Any:
        return args, {**kwargs, "x": 2 * kwargs["x"]}

    for module, hooked in ((Named(loss_of), False), (Single(loss_of), True)):
        if hooked:
            module.register_forward_pre_hook(double, with_kwargs=True)
        plain = copy.deepcopy(module)
        description = {"inputs": [("x", ["batch", 4])], "outputs": [("loss", [], True)]}
        trainer = ORTTrainer(module, description, optim.SGDConfig(lr=0.1))
        x = torch.ones(2, 4)
        torch.testing.assert_close(trainer.train_step(x), plain(x=x).detach())


def test_groups_may_name_what_a_forward_does_not_reach() -> None:
    torch.manual_seed(0)
    module = Single(loss_of)
    module.head = nn.Linear(3, 3)
    plain = copy.deepcopy(module)
    group = {"params": ["linear.bias", "head.bias"], "lr": 0.2}
    description = {"inputs": [("x", ["batch", 4])], "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(module, description, optim.SGDConfig([group], lr=0.1))
    x = torch.ones(2, 4)
    plain(x).backward()
    trainer.train_step(x)
    torch.testing.assert_close(
        module.linear.bias.detach(), plain.linear.bias.detach() - 0.2 * plain.linear.bias.grad
    )


def test_inputs_may_have_any_order_and_names() -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(
            self, x: torch.Tensor, scale: float = 2.0, y: Any = None, *, z: Any = None
        ) -> torch.Tensor:
            return (self.linear(x) * scale + self.linear(y) - self.linear(z)).square().mean()

    x, y, z = torch.ones(2, 4), torch.rand(2, 4), torch.rand(2, 4)
    for names in (("x", "y", "z"), ("z", "y", "x")):
        module = Ordered()
        given = dict(zip(("x", "y", "z"), (x, y, z), strict=True))
        expected = module(**given).detach()
        description = {
            "inputs": [(name, ["batch", 4]) for name in names],
            "outputs": [("loss", [], True)],
        }
        trainer = ORTTrainer(module, description, optim.SGDConfig(lr=0.1))
        torch.testing.assert_close(trainer.train_step(**given), expected)


def counting(module: Single, x: torch.Tensor) -> torch.Tensor:
    """Write to a buffer before reading the argument."""
    with torch.no_grad():
        module.bank.add_(1)
    return loss_of(module, x)


def test_inputs_in_memory_that_a_graph_writes_are_refused() -> None:
    trainer, plain = trained(counting)
    x = torch.ones(5, 4)
    torch.testing.assert_close(trainer.train_step(x), own_loss(plain, x))
    for step in (trainer.train_step, trainer.eval_step):
        with pytest.raises(UnsupportedError, match="'x' lies in the memory of 'bank'"):
            step(trainer.model.bank)
    torch.testing.assert_close(trainer.eval_step(x), plain(x).detach())
    weight = trainer.model.linear.weight.detach()
    with pytest.raises(UnsupportedError, match=r"'x' lies in the memory of 'linear\.weight'"):
        trainer.train_step(weight)
    torch.testing.assert_close(trainer.eval_step(weight), plain(plain.linear.weight).detach())


@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
def test_pieces_see_what_they_write_to_inputs_in_memory_of_the_module() -> None:
    trainer, plain = trained(branching(counting))
    for _ in range(2):
        loss = trainer.train_step(trainer.model.bank)
        torch.testing.assert_close(loss, own_loss(plain, plain.bank))
        torch.testing.assert_close(
            trainer.eval_step(trainer.model.bank), plain(plain.bank).detach()
        )


def counting_apart(module: Single, x: torch.Tensor) -> torch.Tensor:
    """Read a tensor that is no buffer, behind writing to the argument."""
    with torch.no_grad():
        x.add_(1)
    return loss_of(module, x) * module.kept["of steps"][0].mean()


@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
def test_pieces_see_what_they_write_to_inputs_in_memory_of_attributes() -> None:
    trainer, plain = trained(branching(counting_apart))
    for module in (trainer.model, plain):
        module.kept = {"of steps": [torch.ones(3, 4)]}
    for _ in range(2):
        loss = trainer.train_step(trainer.model.kept["of steps"][0])
        torch.testing.assert_close(loss, own_loss(plain, plain.kept["of steps"][0]))
        torch.testing.assert_close(trainer.model.kept, plain.kept)


def test_a_buffer_that_nobody_writes_may_be_given() -> None:
    trainer, plain = trained(loss_of)
    torch.testing.assert_close(
        trainer.eval_step(trainer.model.bank[:3]), plain(plain.bank[:3]).detach()
    )
    assert trainer.report().native_share == 1


@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
@pytest.mark.parametrize("changed", [lambda f: f, branching])
def test_inputs_that_want_gradients_are_refused(changed: Callable[..., Any]) -> None:
    trainer, _ = trained(changed(loss_of))
    with pytest.raises(UnsupportedError, match="'x' wants a gradient"):
        trainer.train_step(torch.ones(2, 4, requires_grad=True))
    trainer.eval_step(torch.ones(2, 4, requires_grad=True))


def test_outputs_of_a_mapping_go_by_their_names() -> None:
    def forward(module: Single, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = module.linear(x)
        return {"more": x, "penalty": hidden.sum(), "loss": hidden.square().mean()}

    trainer, plain = trained(forward, ("penalty", []))
    x = torch.ones(2, 4)
    penalty = plain(x)["penalty"].detach()
    found = trainer.train_step(x)
    torch.testing.assert_close(tuple(found), (own_loss(plain, x), penalty))
    torch.testing.assert_close(trainer.model.linear.weight, plain.linear.weight)


@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
@pytest.mark.parametrize("changed", [lambda f: f, branching])
def test_weights_loaded_inside_of_a_step(changed: Callable[..., Any]) -> None:
    trainer, plain = trained(changed(loss_of), batch={"gradient_accumulation_steps": 2})
    first, second = torch.ones(2, 4), torch.rand(2, 4)
    trainer.train_step(first)
    (plain(first) / 2).backward()
    trainer.load_state_dict(trainer.model.state_dict())
    trainer.train_step(second)
    (plain(second) / 2).backward()
    with torch.no_grad():
        for own, parameter in zip(trainer.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, parameter - 0.1 * parameter.grad)
    assert trainer.train_step_info.optimization_step == 1


def test_states_loaded_inside_of_a_step_begin_it_anew(caplog: pytest.LogCaptureFixture) -> None:
    trainer, plain = trained(loss_of, batch={"gradient_accumulation_steps": 2})
    x = torch.ones(2, 4)
    trainer.train_step(x)
    trainer.load_state_dict(trainer.state_dict())
    assert "gives up the 1 batches" in caplog.text
    for _ in range(2):
        trainer.train_step(x)
    own_loss(plain, x)
    torch.testing.assert_close(trainer.model.linear.weight, plain.linear.weight)


def test_buffers_that_a_step_writes_have_another_version() -> None:
    def forward(module: Single, x: torch.Tensor) -> torch.Tensor:
        loss = (loss_of(module, x) + module.mean).square()
        with torch.no_grad():
            module.mean.add_(1)
        return loss

    trainer, _ = trained(forward)
    wanting = torch.ones((), requires_grad=True)
    result = trainer.model.mean * wanting
    trainer.train_step(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
@pytest.mark.parametrize("changed", [lambda f: f, branching])
def test_outputs_stay_what_they_were(changed: Callable[..., Any]) -> None:
    def forward(module: Single, x: torch.Tensor) -> Any:
        loss = loss_of(module, x)
        with torch.no_grad():
            module.mean.mul_(0.5).add_(loss)
        return loss, module.mean, module.linear.weight, module.linear.bias[1:], x

    trainer, plain = trained(
        changed(forward), ("mean", []), ("w", [3, 4]), ("b", [2]), ("x", ["batch", 4])
    )
    x = torch.ones(2, 4)
    expected = [part.detach().clone() for part in plain(x)]
    found = trainer.train_step(x)
    trainer.train_step(torch.rand(2, 4))
    x.zero_()
    torch.testing.assert_close(list(found), expected)


class Line(nn.Module):
    """Keeps the latest results in a line of buffers, and exchanges two."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("last", torch.zeros(2, 3))
        self.register_buffer("before", torch.ones(2, 3))
        self.register_buffer("one", torch.ones(()))
        self.register_buffer("two", torch.full((), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        with torch.no_grad():
            one = self.one.clone()
            self.one.copy_(self.two)
            self.two.copy_(one)
            self.before.copy_(self.last)
            self.last.copy_(hidden)
        return (hidden + self.before * self.one).square().mean()


@pytest.mark.parametrize("options", [{}, {"device": {"max_memory": "1x"}}])
def test_buffers_that_move_on(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = Line()
    plain = copy.deepcopy(module)
    description = {"inputs": [("x", [2, 4])], "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(
        module, description, optim.SGDConfig(lr=0.1), options=ORTTrainerOptions(options)
    )
    for _ in range(4):
        x = torch.randn(2, 4)
        torch.testing.assert_close(trainer.train_step(x), own_loss(plain, x))
        torch.testing.assert_close(trainer.eval_step(x), plain(x).detach())
        torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))
    assert all(record.fallback == "" for record in trainer.report().captures)


class MakesPlaces(nn.Module):
    """Puts another buffer in the place of one that is too short or too long."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("places", None)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.places is None or len(self.places) != len(x):
            self.places = torch.arange(1.0, len(x) + 1) / len(x)
        scores = self.linear(x) * self.places[:, None]
        return scores.square().mean(), scores


def test_buffers_of_the_batchs_length() -> None:
    torch.manual_seed(0)
    module = MakesPlaces()
    description = {
        "inputs": [("x", ["batch", 4])],
        "outputs": [("loss", [], True), ("scores", ["batch", 4])],
    }
    trainer = ORTTrainer(module, description, optim.SGDConfig(lr=0.1))
    for step, length in enumerate((5, 8, 8, 5, 6)):
        x = torch.randn(length, 4)
        expected = copy.deepcopy(module)(x)
        call = trainer.train_step if step % 2 == 0 else trainer.eval_step
        torch.testing.assert_close(tuple(call(x)), tuple(t.detach() for t in expected))
