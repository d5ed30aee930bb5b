# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Processes that would drift apart, or wait for each other, raise; what is frozen keeps its states."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx.numpy_helper
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from training_runs import CLASSES, FEATURES, batch, make, share, train, weights_of

from ortrain import ORTTrainer, ORTTrainerOptions, optim
from ortrain.amp import DynamicLossScaler, GradScaler
from ortrain.errors import InvalidModelError

Group = Callable[[int], Ranks]
Weights = dict[str, torch.Tensor]


def stage(number: int) -> dict[str, Any]:
    return {"deepspeed_zero_optimization": {"stage": number}}


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except InvalidModelError as error:
        return str(error)
    return "accepted"


class TwoHeads(nn.Module):
    """Trains one or the other head by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(FEATURES, CLASSES)
        self.b = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.shape[0] > 8 else self.b(x)


def run_two_heads(number: int) -> tuple[str, Weights, Weights, Weights]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    description = {
        "inputs": [("x", ["rows", FEATURES]), ("label", ["rows"])],
        "outputs": [("loss", [], True), ("scores", ["rows", CLASSES])],
    }
    trainer = ORTTrainer(
        TwoHeads(),
        description,
        optim.AdamConfig(lr=0.01),
        nn.CrossEntropyLoss(),
        ORTTrainerOptions({"distributed": {"world_size": 2, **stage(number)}}),
    )
    before = weights_of(trainer)
    x, label = batch(0)
    for rows in (12, 6, 12):  # alike in both they are free to change
        trainer.train_step(x[:rows] + rank, label[:rows])
    alike = weights_of(trainer)
    rows = (12, 6)[rank]
    handler = logging.handlers.BufferingHandler(99)
    logging.getLogger("ortrain").addHandler(handler)
    trainer.train_step(x[:rows], label[:rows])
    logging.getLogger("ortrain").removeHandler(handler)
    after = weights_of(trainer)
    for name, tensor in after.items():  # with gradients of zeros from the other process
        assert not torch.equal(tensor, alike[name]), name
    return "; ".join(record.getMessage() for record in handler.buffer), before, alike, after


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [0, 1])
def test_other_parameters_in_one_step(group: Group, number: int) -> None:
    first, second = group(2).run(run_two_heads, number)
    message = "[rank {}] no graph runs this step: 'a.weight' in this step is {} in process {}, {} in process {}"
    assert first[0] == message.format(0, "trained", 0, "not trained", 1)
    assert second[0] == message.format(1, "not trained", 1, "trained", 0)
    for name, expected in first[1].items():
        assert torch.equal(first[2][name], second[2][name])
        assert torch.equal(first[3][name], second[3][name])
        assert not torch.equal(first[2][name], expected)


def run_started_otherwise(what: str) -> str:
    first = dist.get_rank() == 0
    half = {"enabled": True, "dtype": torch.float16}
    groups: dict[str, dict[str, Any]] = {
        "precision": {"mixed_precision": {"enabled": first}},
        "type": {"mixed_precision": {"enabled": True, "dtype": "bfloat16" if first else "float16"}},
        "kind": {
            "mixed_precision": half
            | {"loss_scaler": GradScaler(2.0**10) if first else DynamicLossScaler(True, 2.0**10)}
        },
        "scale": {"mixed_precision": half | {"loss_scaler": GradScaler(64.0 if first else 32.0)}},
    }
    return refusal(lambda: make(2, "adam", **groups[what]))


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("precision", "the precision is"),
        ("type", "the precision is"),
        ("kind", "the loss scaler is"),
        ("scale", "the loss scaler is"),
    ],
)
def test_other_settings_at_the_start(group: Group, what: str, name: str) -> None:
    for rank, text in enumerate(group(2).run(run_started_otherwise, what)):
        assert text.startswith(name)
        assert f"in process {rank}, " in text and f"in process {1 - rank}" in text


def run_changed_later(what: str) -> tuple[str, str, bool]:
    rank = dist.get_rank()
    half = {"enabled": True, "dtype": torch.float16, "loss_scaler": GradScaler(2.0**10)}
    trainer = make(2, "adam", mixed_precision=half)
    train(trainer, rank, 2, 1)
    before = weights_of(trainer)
    if what == "rate":
        trainer.optim_config.lr = 0.1 * (rank + 1)
    else:
        trainer.loss_scaler.loss_scale = 2.0 ** (9 + rank)
    text = refusal(lambda: train(trainer, rank, 2, 1))
    same = all(torch.equal(before[name], t) for name, t in weights_of(trainer).items())
    trainer.optim_config.lr, trainer.loss_scaler.loss_scale = 0.1, 2.0**9
    return text, refusal(lambda: train(trainer, rank, 2, 1)), same


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rate", "the learning rate is 0.1 in process 0, 0.2 in process 1"),
        ("scale", "the loss scale is 512.0 in process 0, 1024.0 in process 1"),
    ],
)
def test_other_settings_later(group: Group, what: str, message: str) -> None:
    results = group(2).run(run_changed_later, what)
    assert results[0][0] == message
    for text, then, same in results:
        assert text != "accepted" and then == "accepted" and same


def run_frozen_in_one(newly_trained: bool) -> tuple[str, Weights]:
    rank = dist.get_rank()
    trainer = make(2, "adam", distributed=stage(1))
    weight = trainer.model[0].weight
    weight.requires_grad_(not newly_trained)
    if newly_trained:  # it has had no place so far
        trainer = ORTTrainer(
            trainer.model,
            trainer.model_desc,
            trainer.optim_config,
            trainer.loss_fn,
            trainer.options,
        )
    train(trainer, rank, 2, 1)
    if rank == 1:
        weight.requires_grad_(newly_trained)
    text = refusal(lambda: train(trainer, rank, 2, 1))
    weight.requires_grad_(True)
    train(trainer, rank, 2, 2)
    return text, weights_of(trainer)


@pytest.mark.parametrize("newly_trained", [False, True])
def test_frozen_in_one_process(group: Group, newly_trained: bool) -> None:
    first, second = group(2).run(run_frozen_in_one, newly_trained)
    assert first[0].startswith("'0.weight' is ((64, 6), 'torch.float32', ")
    assert f"{not newly_trained}) in process 0" in first[0]
    assert f"{newly_trained}) in process 1" in first[0]
    assert second[0] != "accepted"
    for name, expected in first[1].items():
        assert torch.equal(second[1][name], expected), name


def run_others_unfrozen() -> str:
    rank = dist.get_rank()
    frozen = make(2, "adam")
    for name in ("0.bias", "2.bias"):
        frozen.model.get_parameter(name).requires_grad_(False)
    trainer = ORTTrainer(
        frozen.model, frozen.model_desc, frozen.optim_config, frozen.loss_fn, frozen.options
    )
    train(trainer, rank, 2, 1)
    trainer.model.get_parameter(("0.bias", "2.bias")[rank]).requires_grad_(True)
    return refusal(lambda: train(trainer, rank, 2, 1))


def test_others_unfrozen_in_each_process(group: Group) -> None:
    for text in group(2).run(run_others_unfrozen):
        assert text.startswith("'0.bias' is ((64,), 'torch.float32', ")


def run_freezing(number: int, folder: Path, reload: bool) -> tuple[list[str], Weights]:
    rank = dist.get_rank()
    trainer = make(2, "adam", distributed=stage(number))
    train(trainer, rank, 2, 3)
    trainer.model[0].weight.requires_grad_(False)
    train(trainer, rank, 2, 2)
    trainer.save_checkpoint(folder / str(number))
    if reload:  # in a trainer that has never trained it
        model = trainer.model
        trainer = ORTTrainer(
            model, trainer.model_desc, trainer.optim_config, trainer.loss_fn, trainer.options
        )
        trainer.load_checkpoint(folder / str(number))
    states = sorted(trainer.state_dict()["optimizer"])
    trainer.model[0].weight.requires_grad_(True)
    train(trainer, rank, 2, 3)
    return states, weights_of(trainer)


@pytest.mark.parametrize("reload", [False, True])
def test_frozen_parameters_keep_their_states(group: Group, tmp_path: Path, reload: bool) -> None:
    plain, sharded = (group(2).run(run_freezing, n, tmp_path, reload) for n in (0, 1))
    assert plain[0][0] == sharded[0][0]
    assert "0.weight" in plain[0][0]
    for name, expected in plain[0][1].items():
        for _, weights in (*plain[1:], *sharded):
            assert torch.equal(weights[name], expected), name


def run_scales(ours: bool) -> list[float]:
    """Train from a scale that overflows, in this trainer or in DistributedDataParallel."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3), []
    if ours:
        description = {
            "inputs": [("x", ["batch", FEATURES]), ("label", ["batch"])],
            "outputs": [("loss", [], True), ("scores", ["batch", CLASSES])],
        }
        mixed = {"enabled": True, "dtype": torch.float16, "loss_scaler": scaler}
        options = {
            "distributed": {"world_size": 2},
            "utils": {"grad_norm_clip": False},
            "mixed_precision": mixed,
        }
        trainer = ORTTrainer(
            model,
            description,
            optim.SGDConfig(lr=0.1),
            nn.CrossEntropyLoss(),
            ORTTrainerOptions(options),
        )
        for step in range(24):
            trainer.train_step(*share(step, rank, 2))
            scales.append(scaler.get_scale())
        return scales
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(24):
        x, label = share(step, rank, 2)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(parallel(x), label)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_scales_are_those_of_distributed_data_parallel(group: Group) -> None:
    ours, theirs = (group(2).run(run_scales, which) for which in (True, False))
    assert ours == theirs
    assert min(ours[0]) < 2.0**23


def run_export(folder: Path) -> None:
    trainer = make(2, "sgd", clip=False)
    train(trainer, dist.get_rank(), 2, 1)
    if dist.get_rank() == 0:
        trainer.save_as_onnx(folder / "step.onnx", training=True)


def scalars_of(path: Path) -> list[float]:
    graph = onnx.load(path).graph
    tensors = [a.t for n in graph.node for a in n.attribute if a.name == "value"]
    held = [onnx.numpy_helper.to_array(t) for t in (*tensors, *graph.initializer) if not t.dims]
    return sorted(float(value) for value in held)


def test_the_written_step_is_that_of_one_process(group: Group, tmp_path: Path) -> None:
    group(2).run(run_export, tmp_path)
    alone = make(1, "sgd", clip=False)
    train(alone, 0, 1, 1)
    alone.save_as_onnx(tmp_path / "alone.onnx", training=True)
    assert scalars_of(tmp_path / "step.onnx") == scalars_of(tmp_path / "alone.onnx")


def run_plan() -> list[dict[str, int]]:
    trainer = make(2, "adam", batches=2)
    plans = [trainer.engine.memory_plan]
    for _ in range(2):
        train(trainer, dist.get_rank(), 2, 1)
        plans.append(trainer.engine.memory_plan)
    return plans


def test_the_plan_is_that_of_the_larger_graph(group: Group) -> None:
    for before, gradients, whole in group(2).run(run_plan):
        assert before == {}
        assert whole["total_bytes"] >= gradients["total_bytes"] > 0
