# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainer on the GPU provider, simulated: its state lies on the device."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ortrain import ORTModule, ORTTrainer, ORTTrainerOptions, _core, amp, optim
from ortrain.errors import UnsupportedError

pytestmark = pytest.mark.skipif(
    _core.gpu_platform() != "simulator", reason="this build has no simulator"
)

DESCRIPTION = {
    "inputs": [("x", ["n", 6]), ("target", ["n"])],
    "outputs": [("loss", [], True), ("scores", ["n", 3])],
}


def make_trainer(options: dict | None = None, config: optim.AdamConfig | None = None) -> ORTTrainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    return ORTTrainer(
        model,
        DESCRIPTION,
        config or optim.AdamConfig(lr=0.01),
        nn.functional.cross_entropy,
        ORTTrainerOptions(options or {}),
    )


def train(trainer: ORTTrainer, steps: int = 4) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(steps):
        x = torch.randn(5, 6, generator=generator)
        target = torch.randint(0, 3, (5,), generator=generator)
        losses.append(float(trainer.train_step(x, target)[0]))
    return losses


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "1")


def test_losses_are_those_of_the_cpu(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    losses = train(trainer)
    parameters = copy.deepcopy(trainer.state_dict(pytorch_format=True))
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "0")
    expected = make_trainer()
    assert losses == pytest.approx(train(expected), rel=1e-5)
    for name, value in expected.state_dict(pytorch_format=True).items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5)


def test_clipping_and_accumulation(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"batch": {"gradient_accumulation_steps": 2}}
    config = optim.AdamConfig(lr=0.01, max_norm_clip=0.1)
    losses = train(make_trainer(options, config), 6)
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "0")
    assert losses == pytest.approx(train(make_trainer(options, config), 6), rel=1e-5)


def test_loss_scaling_leaves_steps_out(simulated: None) -> None:
    scaler = amp.DynamicLossScaler(loss_scale=2.0**20)
    trainer = make_trainer({"mixed_precision": {"enabled": True, "loss_scaler": scaler}})
    x = torch.full((2, 6), float("inf"))
    trainer.train_step(x, torch.tensor([0, 1]))
    assert not trainer.train_step_info.all_finite
    assert trainer.train_step_info.optimization_step == 0
    train(trainer, 1)


def test_a_checkpoint_goes_on(
    simulated: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = make_trainer()
    train(trainer, 2)
    trainer.save_checkpoint(tmp_path)
    expected = train(trainer, 2)
    again = make_trainer()
    again.load_checkpoint(tmp_path)
    assert train(again, 2) == expected
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "0")
    on_cpu = make_trainer()
    on_cpu.load_checkpoint(tmp_path)
    assert train(on_cpu, 2) == pytest.approx(expected, rel=1e-5)


def test_evaluation(simulated: None) -> None:
    trainer = make_trainer()
    x, target = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    loss, scores = trainer.eval_step(x, target)
    torch.testing.assert_close(scores, trainer.model.eval()(x).detach())
    torch.testing.assert_close(loss, nn.functional.cross_entropy(scores, target))


@pytest.fixture
def lagging(simulated: None) -> Iterator[None]:
    """Let the device be behind the host: no fault is found while it is."""
    _core.simulate_lag(True)
    yield
    _core.simulate_lag(False)


def kept(trainer: ORTTrainer) -> dict[str, torch.Tensor]:
    """Return copies of the parameters and of the optimizer's states."""
    state = {**trainer.state_dict(pytorch_format=True), **trainer.engine.state.optimizer}
    return {name: value.clone() for name, value in state.items()}


def test_a_wrong_label_changes_nothing(simulated: None) -> None:
    trainer, other = make_trainer(), make_trainer()
    for each in (trainer, other):
        train(each, 2)
    before = kept(trainer)
    x = torch.randn(4, 6)
    with pytest.raises(IndexError, match=r"CrossEntropy.*label 3"):
        trainer.train_step(x, torch.tensor([0, 3, 1, 2]))
    torch.testing.assert_close(kept(trainer), before, rtol=0, atol=0)
    assert trainer.train_step_info.optimization_step == 2
    for each in (trainer, other):
        each.train_step(x, torch.tensor([0, 0, 1, 2]))
    torch.testing.assert_close(kept(trainer), kept(other), rtol=0, atol=0)


def test_nor_do_the_steps_until_it_is_found(lagging: None) -> None:
    trainer, other = make_trainer(), make_trainer()
    for each in (trainer, other):
        train(each, 2)
    before = kept(trainer)
    x, target = torch.randn(4, 6), torch.tensor([0, 0, 1, 2])
    trainer.train_step(x, torch.tensor([0, -7, 1, 2]))
    trainer.train_step(x, target)
    _core.simulate_lag(False)
    with pytest.raises(IndexError, match=r"label -7"):
        trainer.train_step(x, target)
    torch.testing.assert_close(kept(trainer), before, rtol=0, atol=0)
    assert trainer.engine.state.steps == trainer.train_step_info.optimization_step == 2
    for each in (trainer, other):
        each.train_step(x, target)
    torch.testing.assert_close(kept(trainer), kept(other), rtol=0, atol=0)


def other_model(x: torch.Tensor) -> None:
    """Run something that has nothing to do with a trainer."""
    ORTModule(nn.Linear(6, 2))(x)


FINDS = {
    "eval_step": lambda trainer, x, target, path: trainer.eval_step(x, target),
    "save_checkpoint": lambda trainer, x, target, path: trainer.save_checkpoint(path),
    "another module": lambda trainer, x, target, path: other_model(x),
    "another trainer": lambda trainer, x, target, path: make_trainer().train_step(x, target),
}


@pytest.mark.parametrize("finds", FINDS.values(), ids=FINDS.keys())
def test_the_number_of_steps_is_right_whoever_finds_it(
    finds: Callable[..., object], lagging: None, tmp_path: Path
) -> None:
    trainer = make_trainer()
    train(trainer, 2)
    info = trainer.train_step_info
    x, target = torch.randn(4, 6), torch.tensor([0, 0, 1, 2])
    trainer.train_step(x, torch.tensor([0, 3, 1, 2]))
    trainer.train_step(x, target)
    _core.simulate_lag(False)
    with pytest.raises(IndexError, match="label 3"):
        finds(trainer, x, target, tmp_path)
    assert info.optimization_step == 2
    trainer.train_step(x, target)
    assert trainer.engine.state.steps == info.optimization_step == 3
    trainer.save_checkpoint(tmp_path)
    again = make_trainer()
    again.load_checkpoint(tmp_path)
    assert again.train_step_info.optimization_step == 3


class Divided(nn.Module):
    def forward(self, x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        return x * (6 // divisor)


def test_nor_does_its_kind_matter(lagging: None) -> None:
    trainer = make_trainer()
    train(trainer, 2)
    x, target = torch.randn(4, 6), torch.tensor([0, 0, 1, 2])
    ORTModule(Divided())(torch.ones(2), torch.tensor([3, 0]))
    trainer.train_step(x, target)
    _core.simulate_lag(False)
    with pytest.raises(_core.OrtrainError, match="division by zero"):
        trainer.train_step(x, target)
    assert trainer.engine.state.steps == trainer.train_step_info.optimization_step == 2


@pytest.mark.parametrize("of", ["checkpoint", "state_dict"])
def test_what_is_loaded_keeps_its_number_of_steps(of: str, lagging: None, tmp_path: Path) -> None:
    trainer, other = make_trainer(), make_trainer()
    for each in (trainer, other):
        train(each, 2)
    trainer.save_checkpoint(tmp_path)
    kept_state = trainer.state_dict()
    x, target = torch.randn(4, 6), torch.tensor([0, 0, 1, 2])
    trainer.train_step(x, torch.tensor([0, 3, 1, 2]))
    trainer.train_step(x, target)
    if of == "checkpoint":
        trainer.load_checkpoint(tmp_path)
    else:
        trainer.load_state_dict(kept_state)
    _core.simulate_lag(False)
    with pytest.raises(IndexError, match="label 3"):
        trainer.train_step(x, target)
    assert trainer.engine.state.steps == trainer.train_step_info.optimization_step == 2
    for each in (trainer, other):
        each.train_step(x, target)
    torch.testing.assert_close(kept(trainer), kept(other), rtol=0, atol=0)


class Tagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x), target)


@pytest.mark.parametrize("kind", [optim.FusedAdamW, optim.FusedSGD, optim.FusedLAMB])
def test_fused_optimizers_leave_out_what_a_wrong_label_made(kind: type, lagging: None) -> None:
    torch.manual_seed(0)
    model = ORTModule(Tagged())
    arguments = {"momentum": 0.9, "dampening": 0.5} if kind is optim.FusedSGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **arguments)
    x, good, bad = torch.randn(4, 6), torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 3, 0])

    def values() -> list[torch.Tensor]:
        states = [s for state in optimizer.state.values() for s in state.values()]
        return [t.detach().clone() for t in (*model.parameters(), *states)]

    def step(target: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x, target).backward()
        optimizer.step()

    step(good)
    before = values()
    step(bad)
    torch.testing.assert_close(values(), before, rtol=0, atol=0)
    # Known by then: the step itself says so.
    optimizer.zero_grad()
    model(x, good).backward()
    _core.simulate_lag(False)
    with pytest.raises(IndexError, match=r"CrossEntropy.*label 3"):
        optimizer.step()
    torch.testing.assert_close(values(), before, rtol=0, atol=0)
    optimizer.step()
    assert not torch.equal(values()[0], before[0])


def test_a_first_step_that_is_refused_leaves_no_buffers(lagging: None) -> None:
    torch.manual_seed(0)
    model = ORTModule(Tagged())
    optimizer = optim.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 6), torch.tensor([0, 5])).backward()
    _core.simulate_lag(False)
    with pytest.raises(IndexError, match="label 5"):
        optimizer.step()
    assert not any(state.get("momentum_buffer") is not None for state in optimizer.state.values())


def test_devices_that_are_not_there() -> None:
    with pytest.raises(UnsupportedError, match=r"device.id.*no provider"):
        ORTTrainerOptions({"device": {"id": "cuda:0"}})
    with pytest.raises(UnsupportedError, match=r"device\.id"):
        ORTTrainerOptions({"device": {"id": "abacus"}})
    with pytest.raises(_core.DeviceError, match="no provider for device 'cuda:0'"):
        _core.TrainingState("cuda:0")


# --- optimizers of their own

OPTIMIZERS = [
    (optim.FusedAdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.FusedAdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    (optim.FusedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.FusedSGD, {"lr": 0.1}),
    (optim.FusedLAMB, {"lr": 0.01}),
]


def step_some(kind: type, arguments: dict, max_grad_norm: float | None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    shapes = [(3, 5), (7,), (), (65, 3)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    parameters.append(nn.Parameter(torch.randn(6, 4).t()))  # in another order of memory
    parameters.append(nn.Parameter(torch.randn(9).to(torch.bfloat16)))
    optimizer = kind(parameters, max_grad_norm=max_grad_norm, **arguments)
    for step in range(3):
        for number, parameter in enumerate(parameters):
            skipped = step == 1 and number == 1
            parameter.grad = None if skipped else torch.randn_like(parameter) * 3
        optimizer.step()
    norm = optimizer.grad_norm
    return [p.detach().float() for p in parameters] + ([] if norm is None else [norm])


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize(("kind", "arguments"), OPTIMIZERS)
def test_optimizers_step_as_on_the_cpu(
    kind: type, arguments: dict, max_grad_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step_some(kind, arguments, max_grad_norm)
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "1")
    actual = step_some(kind, arguments, max_grad_norm)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
