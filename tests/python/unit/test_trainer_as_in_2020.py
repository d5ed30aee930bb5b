# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What programs of 2020 rely on: configurations that stay, flat states, scalers and fetches of one's own, errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTTrainer, ORTTrainerOptions, TrainStepInfo, checkpoint, optim, ort_trainer
from ortrain.amp import DynamicLossScaler
from ortrain.errors import InvalidModelError, ShapeError, UnsupportedError
from ortrain.optim.lr_scheduler import ConstantWarmupLRScheduler, LinearWarmupLRScheduler
from ortrain.orttrainer import ModelDescription

DESCRIPTION = {
    "inputs": [("x", ["batch", 3]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("scores", ["batch", 2])],
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def made(config: Any, **options: Any) -> ORTTrainer:
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss()
    return ORTTrainer(Net(), DESCRIPTION, config, loss, ORTTrainerOptions(options))


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=draw), torch.randint(0, 2, (4,), generator=draw)


def weights(trainer: ORTTrainer) -> dict[str, torch.Tensor]:
    return trainer.state_dict(pytorch_format=True)


def tensors_of(trainer: ORTTrainer) -> list[Any]:
    state = trainer.state_dict()
    return [state["model"], state["optimizer"]]


# --- learning rates


def test_a_configuration_stays_as_it_is() -> None:
    config = optim.SGDConfig(lr=1.0)
    first = made(config, lr_scheduler=LinearWarmupLRScheduler(10, 0.5))
    second = made(config, lr_scheduler=LinearWarmupLRScheduler(10, 0.5))
    third = made(config)
    rates = []
    for step in range(6):
        for trainer in (first, second, third):
            trainer.train_step(*batch(step))
        assert config.lr == 1.0
        rates.append([t.engine.state.learning_rate for t in (first, second, third)])
    assert [r[0] for r in rates] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert [r[1] for r in rates] == [r[0] for r in rates]
    assert [r[2] for r in rates] == [1.0] * 6
    torch.testing.assert_close(weights(first), weights(second), rtol=0, atol=0)


def test_a_schedule_serves_one_trainer_behind_another() -> None:
    schedule = LinearWarmupLRScheduler(10, 0.5)
    trainer = made(optim.SGDConfig(lr=1.0), lr_scheduler=schedule)
    for _ in range(3):
        trainer.train_step(*batch())
    again = made(optim.SGDConfig(lr=0.4), lr_scheduler=schedule)
    rates = []
    for _ in range(3):
        again.train_step(*batch())
        rates.append(again.engine.state.learning_rate)
    assert rates == pytest.approx([0.0, 0.08, 0.16])


def test_a_schedule_needs_no_constructor_of_its_base() -> None:
    class Halves(optim.lr_scheduler._LRScheduler):
        def __init__(self) -> None:
            self.calls = 0

        def get_lr(self, train_step_info: Any) -> list[float]:
            self.calls += 1
            return [train_step_info.optimizer_config.lr / 2**self.calls]

    schedule = Halves()
    assert schedule.get_last_lr() == []
    trainer = made(
        optim.SGDConfig(lr=1.0), lr_scheduler=schedule, batch={"gradient_accumulation_steps": 2}
    )
    rates = []
    for _ in range(4):
        trainer.train_step(*batch())
        rates.append(trainer.engine.state.learning_rate)
    assert rates == [0.5, 0.5, 0.25, 0.25]  # once for each step of the optimizer
    assert Halves().get_last_lr() == []


def test_a_schedule_that_writes_the_configured_rate() -> None:
    class Halves(optim.lr_scheduler._LRScheduler):
        def get_lr(self, train_step_info: Any) -> list[float]:
            train_step_info.optimizer_config.lr *= 0.5
            return [train_step_info.optimizer_config.lr]

    trainer = made(optim.SGDConfig(lr=1.0), lr_scheduler=Halves())
    for _ in range(3):
        trainer.train_step(*batch())
        assert trainer.engine.state.learning_rate == 0.5
        assert trainer.optim_config.lr == 1.0


def test_one_schedule_for_two_trainers_at_a_time() -> None:
    schedule = LinearWarmupLRScheduler(10, 0.5)
    options = {"lr_scheduler": schedule, "batch": {"gradient_accumulation_steps": 2}}
    one, other = (made(optim.SGDConfig(lr=lr), **options) for lr in (1.0, 0.1))
    for step in range(4):
        for trainer, lr in ((one, 1.0), (other, 0.1)):
            trainer.train_step(*batch(step))
            assert trainer.engine.state.learning_rate == pytest.approx(0.2 * lr * (step // 2))


def test_groups_may_be_changed_before_there_is_a_trainer() -> None:
    config = optim.SGDConfig([{"params": ["fc.bias"], "lr": 0.05}], lr=0.1)
    config.params[0]["lr"] = 0.0
    config.params.append({"params": ["fc.weight"], "lr": 0.0})
    trainer = made(config)
    before = weights(trainer)
    trainer.train_step(*batch())
    torch.testing.assert_close(weights(trainer), before, rtol=0, atol=0)
    config.params.append({"params": ["fc.weight"], "alpha": 0.5})
    with pytest.raises(ValueError, match="'alpha'"):
        made(config)


def test_a_resumed_step_keeps_its_rate(tmp_path: Path) -> None:
    def trainer() -> ORTTrainer:
        return made(
            optim.SGDConfig(lr=1.0),
            lr_scheduler=ConstantWarmupLRScheduler(10, 0.5),
            batch={"gradient_accumulation_steps": 2},
        )

    one = trainer()
    for step in range(5):
        one.train_step(*batch(step))
    one.save_checkpoint(tmp_path)
    other = trainer()
    other.load_checkpoint(tmp_path)
    assert other.optim_config.lr == 1.0
    for step in range(5, 8):
        one.train_step(*batch(step))
        other.train_step(*batch(step))
        assert other.engine.state.learning_rate == one.engine.state.learning_rate
    torch.testing.assert_close(weights(other), weights(one), rtol=0, atol=0)


def test_files_in_which_the_configured_rate_stands_with_the_schedule(tmp_path: Path) -> None:
    from ortrain import _core

    one = made(optim.SGDConfig(lr=1.0), lr_scheduler=ConstantWarmupLRScheduler(10, 0.5))
    for step in range(3):
        one.train_step(*batch(step))
    read = _core.load_checkpoint(one.save_checkpoint(tmp_path / "new"))
    kept = json.loads(read.properties["trainer"])
    kept |= {"lr": (0.4).hex(), "scheduler": {"base": (1.0).hex(), "last": (0.4).hex()}}
    state = one.engine.whole_state(optimizer=True, on_all=False)
    _core.save_checkpoint(tmp_path / "old", state, {"trainer": json.dumps(kept)}, True, 2)
    other = made(optim.SGDConfig(lr=0.5), lr_scheduler=ConstantWarmupLRScheduler(10, 0.5))
    other.load_checkpoint(tmp_path / "old")
    assert other.optim_config.lr == 1.0
    other.train_step(*batch())
    assert other.engine.state.learning_rate == pytest.approx(0.6)


# --- states


@pytest.mark.parametrize("kind", [optim.AdamConfig, optim.LambConfig, optim.SGDConfig])
def test_flat_states_go_both_ways(kind: Callable[..., Any]) -> None:
    one = made(kind(lr=0.1))
    for step in range(3):
        one.train_step(*batch(step))
    flat = checkpoint.experimental_state_dict(one)
    assert all(isinstance(tensor, torch.Tensor) for tensor in flat.values())
    assert {"fc.weight", "fc.bias"} <= flat.keys()
    if kind is not optim.SGDConfig:
        assert "Moment_1_fc.bias" in flat
    other = made(kind(lr=0.1))
    checkpoint.experimental_load_state_dict(other, flat, strict=True)
    for step in range(3, 5):
        assert torch.equal(one.train_step(*batch(step))[0], other.train_step(*batch(step))[0])
    bare = checkpoint.experimental_state_dict(one, include_optimizer_state=False)
    assert bare.keys() == {"fc.weight", "fc.bias"}
    checkpoint.experimental_load_state_dict(made(kind()), one.state_dict())
    checkpoint.experimental_load_state_dict(other, one.state_dict())
    torch.testing.assert_close(tensors_of(other), tensors_of(one), rtol=0, atol=0)


def _without(state: dict[str, Any], *path: str) -> dict[str, Any]:
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return state


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: _without(s, "optimizer", "fc.bias", "Moment_1"), "'Moment_1' of 'fc.bias' is"),
        (lambda s: _without(s, "model", "full_precision"), "'model' has no 'full_precision'"),
        (
            lambda s: {**s, "optimizer": {**s["optimizer"], "shared_optimizer_state": {"Lr": 1}}},
            "'shared_optimizer_state' has 'Lr'",
        ),
        (lambda s: {**s, "optimizer": {"fc.bias": 1}}, "states of 'fc.bias' are no dictionary"),
    ],
)
def test_states_that_lack_something_are_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], text: str
) -> None:
    one = made(optim.AdamConfig())
    one.train_step(*batch())
    other = made(optim.AdamConfig())
    before = tensors_of(other)
    with pytest.raises(InvalidModelError, match=text):
        other.load_state_dict(change(one.state_dict()))
    torch.testing.assert_close(tensors_of(other), before, rtol=0, atol=0)


def test_gradients_of_a_step_that_had_begun_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    options = {"batch": {"gradient_accumulation_steps": 2}}
    one, other = made(optim.AdamConfig(), **options), made(optim.AdamConfig(), **options)
    for step in range(3):
        one.train_step(*batch(step))
    with caplog.at_level(logging.WARNING, "ortrain"):
        other.load_state_dict(one.state_dict())
    assert "gives up gradients of an optimizer step that had begun" in caplog.text
    assert "Accumulated_Gradient" not in other.state_dict()["optimizer"]["fc.bias"]
    one.train_step(*batch(3))
    caplog.clear()
    other.load_state_dict(one.state_dict())  # between two steps
    assert not caplog.records


# --- scalers, outputs, descriptions


def test_a_scaler_that_the_program_updates() -> None:
    scaler = DynamicLossScaler(automatic_update=False, loss_scale=8.0, up_scale_window=1)
    mixed = {"enabled": True, "loss_scaler": scaler}
    trainer = made(optim.SGDConfig(), mixed_precision=mixed)
    trainer.train_step(*batch())
    assert scaler.loss_scale == 8.0
    assert scaler.update(trainer.train_step_info) == 16.0
    failed = TrainStepInfo(optim.SGDConfig(), all_finite=False)
    assert scaler.update(failed) == 8.0


def test_the_first_factor_may_lie_outside_of_the_bounds() -> None:
    scaler = DynamicLossScaler(loss_scale=3.0, min_loss_scale=5.0, max_loss_scale=10.0)
    assert scaler.loss_scale == 3.0
    assert scaler.update(TrainStepInfo(optim.SGDConfig(), all_finite=False)) == 5.0


def test_descriptions_have_the_types_of_the_first_step() -> None:
    trainer = made(optim.SGDConfig())
    assert [len(entry) for entry in trainer.model_desc.inputs] == [2, 2]
    trainer.train_step(*batch())
    assert [entry[2] for entry in trainer.model_desc.inputs] == [torch.float32, torch.int64]
    assert [entry[3] for entry in trainer.model_desc.outputs] == [torch.float32] * 2
    entries = {"inputs": trainer.model_desc.inputs, "outputs": trainer.model_desc.outputs}
    assert [len(entry) for entry in ModelDescription(entries).outputs] == [3, 3]
    x, label = batch()
    trainer.eval_step(x, label.int().long())
    with pytest.raises((TypeError, RuntimeError)):
        trainer.eval_step(x.double(), label)  # by the model's own operators, not by the description
    trainer.train_step(x, label)


# --- configurations and errors


def test_a_rule_by_its_name() -> None:
    numbers = {"lr": 0.1, "alpha": 0.8, "lambda_coef": 0.01}
    group = {"params": ["fc.bias"], "alpha": 0.5}
    named = optim._OptimizerConfig("AdamOptimizer", [group], numbers)
    assert named.params == [{**numbers, **group}]
    one, other = made(named), made(optim.AdamConfig([group], **numbers))
    for step in range(3):
        assert torch.equal(one.train_step(*batch(step))[0], other.train_step(*batch(step))[0])
    assert one.state_dict()["optimizer"].keys() == other.state_dict()["optimizer"].keys()
    with pytest.raises(ValueError, match="SGDConfig knows dampening, lr, momentum"):
        made(optim._OptimizerConfig("SGDOptimizer", [], {"lr": 0.1, "alpha": 0.5}))
    with pytest.raises(AssertionError, match="name is 'FooOptimizer'; there are Adagrad"):
        optim._OptimizerConfig("FooOptimizer", [], {"lr": 0.1})


@pytest.mark.parametrize(
    ("call", "kinds"),
    [
        (lambda: TrainStepInfo(optim.SGDConfig(), step=-1), (ValueError, AssertionError)),
        (lambda: TrainStepInfo(optim.SGDConfig(), fetches=-1), (TypeError, AssertionError)),
        (lambda: optim.AdamConfig(lr=None), (TypeError, AssertionError)),
        (lambda: optim.AdamConfig(alpha=2), (ValueError, AssertionError)),
        (lambda: optim.AdamConfig([[]]), (ValueError, AssertionError)),
        (lambda: ORTTrainerOptions({"batch": 1}), (TypeError, ValueError)),
        (lambda: ORTTrainerOptions({"debug": {"check_model_export": 1}}), (TypeError, ValueError)),
        (
            lambda: ModelDescription({"inputs": [("x", None)], "outputs": []}),
            (TypeError, ValueError),
        ),
    ],
)
def test_errors_are_of_both_kinds(
    call: Callable[[], Any], kinds: tuple[type[Exception], ...]
) -> None:
    for kind in kinds:
        with pytest.raises(kind):
            call()


def test_keys_of_earlier_options() -> None:
    from ortrain.orttrainer_options import ORTTrainerOptions as Moved

    assert Moved is ORTTrainerOptions
    Moved({"distributed": {"pipeline_parallel_size": 1, "sliced_schema": {}}})
    Moved({"utils": {"invertible_layer_norm_gradient": True}})
    with pytest.raises(UnsupportedError, match=r"distributed\.pipeline_parallel_size' is 2"):
        Moved({"distributed": {"pipeline_parallel_size": 2}})


# --- evaluation without labels


class Counting(Net):
    """Runs in PyTorch."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [Net, Counting])
@pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")
def test_what_the_loss_alone_takes_may_be_left_out(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer = ORTTrainer(kind(), DESCRIPTION, optim.SGDConfig(lr=0.1), nn.CrossEntropyLoss())
    x, label = batch()
    with pytest.raises(TypeError, match="input 'label' is missing"):
        trainer.eval_step(x)
    scores = trainer.eval_step(x, fetches=["scores"])
    with torch.no_grad():
        torch.testing.assert_close(scores, trainer.model(x))
    with pytest.raises(TypeError, match="input 'label' is missing"):
        trainer.eval_step(x, fetches=["scores", "loss"])
    with pytest.raises(TypeError, match="input 'label' is missing"):
        trainer.train_step(x, fetches=["scores"])
    loss, _ = trainer.train_step(x, label)
    trainer._train_step_info.fetches = ["scores"]
    after = trainer.eval_step(x)
    with torch.no_grad():
        torch.testing.assert_close(after, trainer.model(x))
    assert not torch.equal(after, scores)
    torch.testing.assert_close(trainer.eval_step(x, label), after)
    trainer._train_step_info.fetches = []
    assert trainer.eval_step(x, label)[0] < loss
    if kind is Net:
        trainer.save_as_onnx(tmp_path / "net.onnx")


# --- descriptions


def test_what_the_first_batch_shows_counts_and_later_ones_are_like_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = {
        "inputs": [("x", [64, 3]), ("label", [64, 2])],
        "outputs": [("loss", [3], True), ("scores", ["batch", 7])],
    }
    torch.manual_seed(0)
    trainers = [
        ORTTrainer(Net(), each, optim.SGDConfig(lr=0.1), nn.CrossEntropyLoss())
        for each in (wrong, DESCRIPTION)
    ]
    trainers[0].model.load_state_dict(trainers[1].model.state_dict())
    for step in range(3):
        losses = [trainer.train_step(*batch(step))[0] for trainer in trainers]
        assert torch.equal(*losses)
    told = [message for message in caplog.messages if message.endswith("which counts")]
    assert [message.split("'")[1] for message in told] == ["x", "label", "loss", "scores"]
    assert (
        told[1]
        == "the description says that input 'label' is [64, 2]; it is int64[4], which counts"
    )
    with pytest.raises(ShapeError, match=r"input 'x' has shape \[4, 2\], model_desc says"):
        trainers[1].train_step(batch()[0][:, :2], batch()[1])
    with pytest.raises(ShapeError, match="input 'label' has shape"):
        trainers[0].train_step(batch()[0], batch()[1][:, None])


def test_batches_that_fail_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    trainer = made(optim.SGDConfig(lr=0.1))
    x, label = batch()
    with pytest.raises(Exception, match="cannot be multiplied"):
        trainer.train_step(x[:, :2], label)
    trainer.train_step(x, label)
    with pytest.raises(ShapeError, match=r"input 'x' has shape \[4, 2\]"):
        trainer.train_step(x[:, :2], label)


def test_inputs_that_come_later_are_held_against_those_before() -> None:
    described = {
        "inputs": [("x", ["batch", "places", 3]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("scores", ["batch", "places", 2])],
    }

    def loss(scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores.view(-1, 2), label)

    trainer = ORTTrainer(Net(), described, optim.SGDConfig(lr=0.1), loss)
    x, label = torch.randn(4, 5, 3), torch.randint(0, 2, (20,))
    assert trainer.eval_step(x, fetches=["scores"]).shape == (4, 5, 2)
    assert trainer.train_step(x, label)[1].shape == (4, 5, 2)


def test_a_wrong_type_leaves_the_shape() -> None:
    x = ort_trainer.IODescription("x", ["batch", 3], torch.float64)
    label = ort_trainer.IODescription("label", ["batch"], torch.int64)
    outputs = [ort_trainer.IODescription(name, []) for name in ("loss", "scores")]
    described = ort_trainer.ModelDescription([x, label], outputs)
    loss = nn.CrossEntropyLoss()
    trainer = ort_trainer.ORTTrainer(Net(), loss, described, "SGDOptimizer", None, None)
    trainer.train_step(*batch())
    with pytest.raises(ShapeError, match=r"input 'x' has shape \[4, 2\]"):
        trainer.train_step(batch()[0][:, :2], batch()[1])


def test_results_by_name_with_a_loss_function() -> None:
    class Named(Net):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = super().forward(x)
            return {"hidden": 100 * scores, "scores": scores}

    def loss(result: dict[str, torch.Tensor], label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(result["scores"], label)

    trainer = ORTTrainer(Named(), DESCRIPTION, optim.SGDConfig(lr=0.1), loss)
    x, label = batch()
    expected = trainer.model(x)["scores"].detach()
    for scores in (trainer.eval_step(x, fetches=["scores"]), trainer.eval_step(x, label)[1]):
        torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(trainer.train_step(x, label)[1], expected)
