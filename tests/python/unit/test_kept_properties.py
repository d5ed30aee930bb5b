# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What checkpoints and state dictionaries say of a trainer is checked before anything changes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTTrainer, _core, optim
from ortrain.checkpoint import aggregate_checkpoints
from ortrain.errors import InvalidModelError
from ortrain.trainer.kept_properties import KeptProperties
from ortrain.trainer.options import ORTTrainerOptions

DESCRIPTION = {"inputs": [("x", ["b", 4])], "outputs": [("loss", [], True)]}
X = torch.ones(2, 4)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def made(steps: int = 1, **groups: Any) -> ORTTrainer:
    torch.manual_seed(0)
    trainer = ORTTrainer(
        Loss(), DESCRIPTION, optim.AdamConfig(lr=1e-2), options=ORTTrainerOptions(groups)
    )
    for _ in range(steps):
        trainer.train_step(X)
    return trainer


def checkpoint_of(trainer: ORTTrainer, folder: Path) -> tuple[Any, dict[str, Any]]:
    trainer.save_checkpoint(folder)
    read = _core.load_checkpoint(folder)
    return read, json.loads(read.properties["trainer"])


def write(
    read: Any, folder: Path, text: str, states: dict[str, torch.Tensor] | None = None
) -> None:
    """Write a checkpoint with another property, or other states of the optimizer."""
    state = _core.TrainingState()
    for name, tensor in read.tensors.items():
        state.share(name, tensor)
    for name, tensor in (read.optimizer if states is None else states).items():
        state.share_state(name, tensor)
    state.steps = read.steps
    _core.save_checkpoint(folder, state, {"trainer": text}, True, 2)


def refusal(folder: Path, **groups: Any) -> str:
    """Return why a trainer does not load a checkpoint; nothing of it has changed."""
    trainer = made(**groups)
    before = copy.deepcopy(trainer.state_dict())
    rate = trainer.optim_config.lr
    with pytest.raises(InvalidModelError) as error:
        trainer.load_checkpoint(folder)
    after = trainer.state_dict()
    torch.testing.assert_close(after["model"], before["model"], rtol=0, atol=0)
    torch.testing.assert_close(after["optimizer"], before["optimizer"], rtol=0, atol=0)
    assert after["train_step_info"] == before["train_step_info"]
    assert trainer.optim_config.lr == rate
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lr": 5}, "'lr' as 5: expected a text"),
        ({"lr": "nan"}, "'lr' as 'nan': expected a finite number"),
        ({"lr": "-0x1p3"}, "expected a finite number, 0 or more"),
        ({"lr": "one"}, "'lr' as 'one'"),
        ({"step": "abc"}, "'step' as 'abc': expected a whole number"),
        ({"step": True}, "'step' as True"),
        ({"optimization_step": -7}, "'optimization_step' as -7: expected 0 or more"),
        ({"optimization_step": 2**62}, "expected 0 or more"),
        ({"accumulation": {}}, "lacks 'batches'"),
        ({"accumulation": {"batches": 0, "of": 2, "loss_scale": 1.0}}, "expected 1 or more"),
        ({"accumulation": {"batches": 1, "of": 2, "loss_scale": 0.0}}, "above 0"),
        ({"loss_scaler": []}, "is no object"),
        ({"scheduler": 3}, "'scheduler' as 3: expected an object"),
        ({"scheduler": {"base": "x", "last": None}}, "'base' is no finite number"),
        ({"scheduler": {}}, "'last' is no finite number"),
        ({"user": 1}, "'user' as 1: expected an object"),
        ({"optimizer": 4}, "'optimizer' as 4: expected a text"),
    ],
)
def test_properties(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    read, kept = checkpoint_of(made(5), tmp_path / "good")
    write(read, tmp_path / "bad", json.dumps({**kept, **change}))
    schedule = {"lr_scheduler": optim.lr_scheduler.LinearWarmupLRScheduler(10)}
    assert text in refusal(tmp_path / "bad", **(schedule if "scheduler" in change else {}))


@pytest.mark.parametrize("text", ["{", "[]", "null", "3", '"a"', "[" * 10000, "1e999", "NaN", ""])
def test_what_is_no_object(text: str, tmp_path: Path) -> None:
    read, _ = checkpoint_of(made(5), tmp_path / "good")
    write(read, tmp_path / "bad", text)
    assert "what the checkpoint says of the trainer" in refusal(tmp_path / "bad")


def drawn(draw: random.Random, depth: int = 0) -> Any:
    """Return any value of JSON."""
    kind = draw.randrange(9 if depth < 3 else 6)
    if kind == 6:
        return [drawn(draw, depth + 1) for _ in range(draw.randrange(3))]
    if kind >= 7:
        keys = ["base", "last", "kind", "state", "batches", "of", "loss_scale", "x"]
        return {draw.choice(keys): drawn(draw, depth + 1) for _ in range(draw.randrange(4))}
    number = draw.choice([0, 1, -1, 2**63, -(2**70), 7])
    texts = ["", "0x1p-3", "inf", "nan", "é\n", "-0x1p3", "0x1p99999"]
    values = [None, True, number, number * 0.37, draw.choice(texts)]
    return draw.choice([*values, float("nan"), float("inf")])


@pytest.mark.parametrize("seed", range(3))
def test_random_properties_are_read_or_refused(seed: int) -> None:
    draw = random.Random(seed)
    names = [*KeptProperties.__dataclass_fields__, "other"]
    for _ in range(1500):
        given = {name: drawn(draw) for name in draw.sample(names, draw.randrange(len(names)))}
        try:
            kept = KeptProperties.parse(json.dumps(given))
        except InvalidModelError:
            continue
        for count in (kept.step, kept.optimization_step):
            assert count is None or 0 <= count < 2**62
        assert kept.lr is None or 0 <= kept.lr < float("inf")
        assert isinstance(kept.user, dict)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.pop("linear.weight:exp_avg_sq"), "lacks the state 'linear.weight:exp_avg_sq'"),
        (lambda s: s.update({"nocolon": torch.zeros(4)}), "'nocolon': there is no such parameter"),
        (lambda s: s.update({"linear.bias:speed": torch.zeros(4)}), "keeps exp_avg, exp_avg_sq"),
        (lambda s: s.update({"count:exp_avg": torch.zeros(())}), "there is no such parameter"),
        (
            lambda s: s.update({"linear.bias:exp_avg": torch.zeros(4, dtype=torch.float16)}),
            r"it is float16[4], expected float32[4]",
        ),
    ],
)
def test_states_of_the_optimizer(
    change: Callable[[dict[str, torch.Tensor]], Any], text: str, tmp_path: Path
) -> None:
    read, kept = checkpoint_of(made(5), tmp_path / "good")
    states = dict(read.optimizer)
    change(states)
    write(read, tmp_path / "bad", json.dumps(kept), states)
    assert text in refusal(tmp_path / "bad")
    trainer = made(0)
    trainer.load_checkpoint(tmp_path / "bad", strict=False)
    trainer.train_step(X)
    assert set(trainer.engine.state.optimizer) == set(read.optimizer)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda s: s["optimizer"]["linear.weight"].update(
                Moment_1=torch.empty(4, 4, device="meta")
            ),
            "on the device 'meta'",
        ),
        (
            lambda s: s["optimizer"]["linear.weight"].update(Moment_1=torch.eye(4).to_sparse()),
            "expected a dense tensor",
        ),
        (lambda s: s["train_step_info"].update(step="zz"), "'step' is 'zz'"),
        (lambda s: s["train_step_info"].update(step=-1), "expected a whole number"),
        (lambda s: s["train_step_info"].update(optimization_step=2.5), "expected a whole number"),
        (
            lambda s: s["model"]["full_precision"].update(
                {"linear.bias": torch.empty(4, device="meta")}
            ),
            "on the device 'meta'",
        ),
        (
            lambda s: s["model"]["full_precision"].update({"linear.weight": 1j * torch.ones(4, 4)}),
            "'linear.weight' is complex64, the trainer has float32",
        ),
        (
            lambda s: s["model"]["full_precision"].update(
                {"linear.weight": torch.full((4, 4), 1e300, dtype=torch.float64)}
            ),
            "values that float32 does not hold",
        ),
        (
            lambda s: s["model"]["full_precision"].update({"count": torch.tensor(2.7)}),
            "'count' has float32 values that int64 does not hold",
        ),
    ],
)
def test_state_dictionaries(change: Callable[[dict[str, Any]], Any], text: str) -> None:
    good = made(3).state_dict()
    trainer = made()
    before = copy.deepcopy(trainer.state_dict())
    change(good)
    with pytest.raises(InvalidModelError) as error:
        trainer.load_state_dict(good)
    assert text in str(error.value)
    after = trainer.state_dict()
    torch.testing.assert_close(after["model"], before["model"], rtol=0, atol=0)
    torch.testing.assert_close(after["optimizer"], before["optimizer"], rtol=0, atol=0)


def test_other_widths_are_taken() -> None:
    good = made(3).state_dict()
    weights = good["model"]["full_precision"]
    weights["linear.weight"] = weights["linear.weight"].double()
    weights["count"] = torch.tensor(2.0)
    weights["mask"] = torch.tensor([1, 0, 255], dtype=torch.uint8)
    trainer = made()
    trainer.load_state_dict(good)
    assert torch.equal(trainer.model.linear.weight, weights["linear.weight"].float())
    assert trainer.model.count == 2
    assert trainer.model.mask.tolist() == [True, False, True]


def test_states_of_other_numbers_of_the_rule(tmp_path: Path) -> None:
    """What ZeRO writes, or a run with momentum, goes on without."""

    def sgd(momentum: float) -> ORTTrainer:
        torch.manual_seed(0)
        config = optim.SGDConfig(
            [{"params": ["linear.bias"], "momentum": 0.0}], lr=0.1, momentum=momentum
        )
        return ORTTrainer(Loss(), DESCRIPTION, config)

    trainer = sgd(0.9)
    trainer.train_step(X)
    read, kept = checkpoint_of(trainer, tmp_path / "good")
    states = {**read.optimizer, "linear.bias:momentum_buffer": torch.zeros(4)}
    write(read, tmp_path / "all", json.dumps(kept), states)
    for folder, momentum in (("all", 0.9), ("good", 0.0), ("all", 0.0)):
        again = sgd(momentum)
        again.load_checkpoint(tmp_path / folder)
        again.train_step(X)
        of_weight = ["linear.weight:momentum_buffer"] if momentum else []
        assert list(again.engine.state.optimizer) == of_weight


def test_an_older_checkpoint_in_place_of_a_damaged_one_is_told(tmp_path: Path) -> None:
    trainer = made()
    trainer.save_checkpoint(tmp_path)
    trainer.train_step(X)
    newest = trainer.save_checkpoint(tmp_path) / "parameters.safetensors"
    contents = bytearray(newest.read_bytes())
    contents[-3] ^= 1
    newest.write_bytes(contents)
    with pytest.warns(UserWarning, match="newer ones are damaged"):
        state = aggregate_checkpoints([tmp_path], pytorch_format=False)
    assert state["train_step_info"] == {"optimization_step": 1, "step": 1}
