# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainer in several processes that share the batch, against one process with all of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import onnx
import onnx.parser
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, ranks
from torch import nn
from training_runs import CLASSES, FEATURES, Run, batch, make, share, train, weights_of

from ortrain import ORTTrainer, ORTTrainerOptions, optim, ort_trainer
from ortrain.amp import DynamicLossScaler
from ortrain.distributed import Processes
from ortrain.errors import InvalidModelError
from ortrain.trainer import gradient_buckets, parallel_step_engine

Group = Callable[[int], Ranks]


def run(steps: int, optimizer: str, given: dict[str, Any]) -> Run:
    """Train in each of the joined processes, which start with different weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    trainer = make(size, optimizer, seed=1 + rank, **given)
    losses = train(trainer, rank, size, steps)
    return Run(losses, weights_of(trainer), state_bytes=trainer.engine.optimizer_state_bytes)


def run_alone(steps: int, optimizer: str, given: dict[str, Any]) -> Run:
    plain = {k: v for k, v in given.items() if k != "distributed"}
    trainer = make(1, optimizer, **plain)
    return Run(train(trainer, 0, 1, steps), weights_of(trainer))


def check_alike(runs: list[Run], alone: Run) -> None:
    for step, expected in enumerate(alone.losses):
        assert sum(r.losses[step] for r in runs) / len(runs) == pytest.approx(expected, abs=1e-5)
    for name, expected in alone.weights.items():
        torch.testing.assert_close(runs[0].weights[name], expected, rtol=1e-6, atol=1e-6)
        for other in runs[1:]:
            assert torch.equal(runs[0].weights[name], other.weights[name]), name


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adagrad", "lamb"])
@pytest.mark.parametrize("stage", [0, 1])
def test_as_one_process_with_the_whole_batch(group: Group, optimizer: str, stage: int) -> None:
    given = {"distributed": {"deepspeed_zero_optimization": {"stage": stage}}}
    runs = group(2).run(run, 8, optimizer, given)
    check_alike(runs, run_alone(8, optimizer, given))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_accumulated_batches(group: Group, stage: int, once: bool, clip: bool) -> None:
    distributed = {
        "allreduce_post_accumulation": once,
        "deepspeed_zero_optimization": {"stage": stage},
    }
    given = {"batches": 3, "clip": clip, "distributed": distributed}
    check_alike(group(2).run(run, 9, "adam", given), run_alone(9, "adam", given))


def run_in_buckets(steps: int, given: dict[str, Any]) -> tuple[Run, list[str]]:
    """Train with small buckets; also return what happened in the latest batch."""
    events: list[str] = []
    before = gradient_buckets._BUCKET, parallel_step_engine._STRETCH, Processes.begin_all_reduce
    gradient_buckets._BUCKET, parallel_step_engine._STRETCH = 256, 1

    def begin(self: Processes, tensor: torch.Tensor) -> Any:
        events.append(f"{tensor.numel()} elements")
        return before[2](self, tensor)

    def finished(self: gradient_buckets.GradientBuckets, parameters: list[str]) -> None:
        events.append(f"gradients of {sorted(parameters)}")
        tells(self, parameters)

    tells = gradient_buckets.GradientBuckets.finished
    Processes.begin_all_reduce = begin
    gradient_buckets.GradientBuckets.finished = finished
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        trainer = make(size, "adam", seed=1 + rank, **given)
        losses = train(trainer, rank, size, steps - 1)
        events.clear()
        losses += train(trainer, rank, size, 1)
        return Run(losses, weights_of(trainer)), events
    finally:
        gradient_buckets._BUCKET, parallel_step_engine._STRETCH, Processes.begin_all_reduce = before
        gradient_buckets.GradientBuckets.finished = tells


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_go_while_the_backward_goes_on(group: Group, stage: int, once: bool) -> None:
    distributed = {
        "allreduce_post_accumulation": once,
        "deepspeed_zero_optimization": {"stage": stage},
    }
    given = {"batches": 2, "distributed": distributed}
    results = group(2).run(run_in_buckets, 6, given)
    check_alike([run for run, _ in results], run_alone(6, "adam", given))
    assert results[0][1] == results[1][1]
    events = results[0][1]
    first_layer = next(i for i, e in enumerate(events) if e.startswith("gradients") and "0." in e)
    assert any(e.endswith("elements") for e in events[:first_layer]), events


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [3, 4])
def test_more_processes(group: Group, size: int) -> None:
    runs = group(size).run(run_uneven, 6)
    for other in runs[1:]:
        for name, expected in runs[0].items():
            assert torch.equal(expected, other[name])


def run_uneven(steps: int) -> dict[str, torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = {"deepspeed_zero_optimization": {"stage": 1}}
    plain, sharded = make(size, "adam"), make(size, "adam", distributed=stage)
    for trainer in (plain, sharded):
        train(trainer, rank, size, steps)
    weights = weights_of(plain)
    for name, tensor in weights_of(sharded).items():
        assert torch.equal(weights[name], tensor), name
    return weights


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adagrad"])
@pytest.mark.parametrize("clip", [False, True])
def test_shared_states_change_no_bit(group: Group, optimizer: str, clip: bool) -> None:
    plain, sharded = (
        group(2).run(
            run,
            8,
            optimizer,
            {"clip": clip, "distributed": {"deepspeed_zero_optimization": {"stage": stage}}},
        )
        for stage in (0, 1)
    )
    assert plain[0].losses == sharded[0].losses
    for name, expected in plain[0].weights.items():
        assert torch.equal(expected, sharded[1].weights[name]), name
    for made in sharded:  # the first layer has most of the parameters
        assert made.state_bytes <= 0.55 * plain[0].state_bytes
    assert sum(made.state_bytes for made in sharded) >= plain[0].state_bytes


def run_with_overflow() -> tuple[list[bool], list[float], dict[str, torch.Tensor]]:
    rank = dist.get_rank()
    mixed = {"enabled": True, "loss_scaler": DynamicLossScaler(loss_scale=1024.0)}
    trainer = make(2, "adam", mixed_precision=mixed)
    updated, scales = [], []
    for step in range(4):
        x, label = share(step, rank, 2)
        if step == 1 and rank == 1:
            x[0, 0] = torch.inf
        before = weights_of(trainer)
        trainer.train_step(x, label)
        updated.append(any(not torch.equal(before[n], t) for n, t in weights_of(trainer).items()))
        scales.append(trainer.loss_scaler.loss_scale)
    return updated, scales, weights_of(trainer)


def test_gradients_that_are_not_finite_in_one_process(group: Group) -> None:
    results = group(2).run(run_with_overflow)
    for updated, scales, weights in results:
        assert updated == [True, False, True, True]
        assert scales == [1024.0, 512.0, 512.0, 512.0]
        for name, expected in results[0][2].items():
            assert torch.equal(expected, weights[name])


def run_types() -> dict[str, torch.Tensor]:
    """Train parameters of several types, of which some become trained later."""
    rank = dist.get_rank()
    stage = {"deepspeed_zero_optimization": {"stage": 1}}
    results = []
    for distributed in ({}, stage):
        torch.manual_seed(rank)
        model = Mixed()
        trainer = trainer_of(model, distributed)
        for step in range(6):
            if step == 3:
                model.narrow.requires_grad_(True)
            trainer.train_step(*share(step, rank, 2))
        results.append(weights_of(trainer))
    for name, expected in results[0].items():
        assert torch.equal(expected, results[1][name]), name
    return results[0]


class Mixed(nn.Module):
    """Has parameters in 16, 32 and 64 bits, a scalar, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(FEATURES, 20, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(20)
        self.narrow = nn.Parameter(torch.randn(20, CLASSES).bfloat16(), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm((x.double() @ self.wide).float())
        return self.scale * (hidden.bfloat16() @ self.narrow).float()


def trainer_of(
    model: nn.Module, distributed: dict[str, Any], config: Any = optim.AdamConfig
) -> ORTTrainer:
    description = {
        "inputs": [("x", ["batch", FEATURES]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("scores", ["batch", CLASSES])],
    }
    options = ORTTrainerOptions({"distributed": {"world_size": 2, **distributed}})
    return ORTTrainer(model, description, config(lr=0.1), nn.CrossEntropyLoss(), options)


def test_types_buffers_and_what_is_trained_later(group: Group) -> None:
    first, second = group(2).run(run_types)
    torch.manual_seed(0)
    start = Mixed().state_dict()
    for name, expected in first.items():
        assert torch.equal(expected, second[name]), name
        assert not torch.equal(expected, start[name]), name


def run_masks(steps: int) -> list[float]:
    trainer = make(2, "sgd", model={"dropout": 0.5})
    return [trainer.train_step(*batch(0))[0].item() for _ in range(steps)]


def test_processes_draw_different_masks(group: Group) -> None:
    first, second = group(2).run(run_masks, 1)
    assert first != second


def run_refused(what: str) -> str:
    rank = dist.get_rank()
    try:
        if what == "size":
            make(3, "sgd")
        elif what == "rank":
            make(2, "sgd", distributed={"world_rank": 1 - rank})
        elif what == "local":
            make(2, "sgd", distributed={"local_rank": 1 - rank})
        elif what == "model":
            make(2, "sgd", model={"normed": rank == 1})
        elif what == "settings":
            make(2, "sgd", distributed={"allreduce_post_accumulation": rank == 1})
        elif what == "optimizer":
            make(2, "sgd" if rank == 1 else "momentum")
        elif what == "frozen":
            frozen = ["0.bias"] if rank == 0 else ["other"]
            make(2, "sgd", utils={"frozen_weights": frozen})
    except (ValueError, InvalidModelError) as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("size", "'distributed.world_size' is 3, the process group .* says 2"),
        ("rank", "'distributed.world_rank' is [01], the process group"),
        ("local", "'distributed.local_rank' is [01], torchrun says [01]"),
        ("model", r"'2.weight' is .*, True\) in process 0, None in process 1"),
        ("settings", "distributed options"),
        ("optimizer", "the optimizer's numbers"),
        ("frozen", "process 1: 'other' is no parameter"),
    ],
)
def test_contradictions_are_named(group: Group, what: str, message: str) -> None:
    texts = group(2).run(run_refused, what)
    assert re.search(message, texts[0])
    assert "accepted" not in texts


def run_unasked() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ortrain.trainer")
    logger.addHandler(handler)
    try:
        make(1, "sgd")
    finally:
        logger.removeHandler(handler)
    return records


def test_training_alone_among_others_is_told(group: Group) -> None:
    for records in group(2).run(run_unasked):
        assert len(records) == 1
        assert "'distributed.world_size' makes them train together" in records[0]


def run_unjoined() -> tuple[int, float]:
    """Let the trainer initialize torch.distributed."""
    assert not dist.is_initialized()
    trainer = make(2, "sgd")
    train(trainer, dist.get_rank(), 2, 2)
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    # The options are the program's, and stay as it gave them.
    assert trainer.options.distributed.world_rank == 0
    return trainer.world_rank, total.item()


def test_the_group_is_made_by_what_the_launcher_says() -> None:
    with ranks(2, joined=False) as processes:
        assert processes.run(run_unjoined) == [(0, 1.0), (1, 1.0)]


class Words(nn.Module):
    """Has an embedding with nearly all of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 12)
        self.scores = nn.Linear(12, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scores(self.words(tokens).mean(1))


class PartlyUsed(nn.Module):
    """Has a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(300))
        self.used = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def run_partly_used(config: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    distributed = {"deepspeed_zero_optimization": {"stage": 1}}
    trainer = trainer_of(PartlyUsed(), distributed, config)
    losses = [trainer.train_step(*share(0, rank, 2))[0].item() for _ in range(4)]
    return weights_of(trainer), losses


@pytest.mark.parametrize("config", [optim.AdamConfig, optim.LambConfig])
def test_parameters_that_are_not_used(group: Group, config: Any) -> None:
    # The first process has slices of what is not used alone.
    (first, losses), (second, _) = group(2).run(run_partly_used, config)
    torch.manual_seed(0)
    assert torch.equal(first["unused"], PartlyUsed().unused)
    assert losses[-1] < losses[0]
    for name, expected in first.items():
        assert torch.equal(second[name], expected)


def run_words(optimizer: str, stage: int) -> Run:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    description = {
        "inputs": [("tokens", ["batch", 5]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("scores", ["batch", CLASSES])],
    }
    distributed = {"world_size": 2, "deepspeed_zero_optimization": {"stage": stage}}
    config = optim.LambConfig(lr=0.01) if optimizer == "lamb" else optim.AdamConfig(lr=0.01)
    trainer = ORTTrainer(
        Words(),
        description,
        config,
        nn.CrossEntropyLoss(),
        ORTTrainerOptions({"distributed": distributed}),
    )
    losses = []
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(0, 500, (6, 5), generator=generator)
        label = torch.randint(0, CLASSES, (6,), generator=generator)
        losses.append(trainer.train_step(tokens, label)[0].item())
    return Run(losses, weights_of(trainer), state_bytes=trainer.engine.optimizer_state_bytes)


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_one_large_parameter_is_shared_too(group: Group, optimizer: str) -> None:
    whole, shared = (group(2).run(run_words, optimizer, stage) for stage in (0, 1))
    for rank in range(2):
        assert shared[rank].losses == pytest.approx(whole[rank].losses, abs=1e-6)
        assert shared[rank].state_bytes <= 0.55 * whole[rank].state_bytes
        for name, expected in whole[0].weights.items():
            torch.testing.assert_close(shared[rank].weights[name], expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(shared[rank].weights[name], shared[0].weights[name])
            if optimizer == "adam":
                assert torch.equal(shared[rank].weights[name], expected)


def run_of_2020() -> dict[str, torch.Tensor]:
    """Train an ONNX model by the first form of the trainer."""
    rank = dist.get_rank()
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        net (float[batch, 6] x, int64[batch] label) => (float loss)
        {
          scores = MatMul(x, weight)
          loss = SoftmaxCrossEntropyLoss(scores, label)
        }"""
    )
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight.numpy(), "weight"))
    description = ort_trainer.ModelDescription(
        [
            ort_trainer.IODescription("x", ["batch", 6], torch.float32),
            ort_trainer.IODescription("label", ["batch"], torch.int64),
        ],
        [ort_trainer.IODescription("loss", [], torch.float32)],
    )
    trainer = ort_trainer.ORTTrainer(
        model,
        None,
        description,
        "AdamOptimizer",
        None,
        None,
        world_rank=rank,
        world_size=2,
        deepspeed_zero_stage=1,
    )
    losses = [trainer.train_step(*share(0, rank, 2)) for _ in range(4)]
    assert losses[-1] < losses[0]
    return trainer.state_dict()


def test_onnx_models_in_the_form_of_2020(group: Group) -> None:
    first, second = group(2).run(run_of_2020)
    assert torch.equal(first["weight"], second["weight"])


def run_unfreezing(optimizer: str, given: dict[str, Any]) -> Run:
    """Train, of the first layer some steps later than of the others; the last processes hold its states."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    trainer = make(size, optimizer, **given)
    losses = []
    for frozen in (True, False):
        trainer.model[0].requires_grad_(not frozen)
        losses += train(trainer, rank, size, 3)
    counts = trainer.engine.whole_state().updates
    assert (counts["0.weight"], counts["2.weight"]) == (3, 6)
    return Run(losses, weights_of(trainer))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.parametrize("stage", [0, 1])
def test_layers_that_begin_later(group: Group, optimizer: str, stage: int) -> None:
    given = {"distributed": {"deepspeed_zero_optimization": {"stage": stage}}}
    runs = group(2).run(run_unfreezing, optimizer, given)
    check_alike(runs, run_unfreezing(optimizer, {}))
