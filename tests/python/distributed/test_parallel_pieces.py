# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainer in several processes of modules that no graph holds whole, against DistributedDataParallel."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from training_runs import CLASSES, FEATURES, share, weights_of

from ortrain import ORTTrainer, ORTTrainerOptions, optim
from ortrain.errors import InvalidModelError, UnsupportedError

Group = Callable[[int], Ranks]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 40)
        self.second = nn.Linear(40, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.zeros(40))
        self.register_buffer("scale", torch.ones(40, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return self.second(hidden + self.mean) / self.calls


class Normed(Counts):
    """Whose running statistics PyTorch writes without counting a write."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Experts(nn.Module):
    """Each process trains others of its layers, and some of them nobody does, by draws of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[random.randrange(4)](x)


class CountsInOneProcess(Net):
    """Of which process 0 has a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.counts = dist.get_rank() == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
        return super().forward(x)


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.table = nn.Embedding(11, CLASSES, sparse=True)
        self.scale = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.table((x.abs() * 7).long() % 11).mean(1) * self.scale


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (Counts, Normed, Experts, CountsInOneProcess, SparseTable)
}
CONFIGS = {
    "sgd": lambda: optim.SGDConfig(lr=0.1),
    "adam": lambda: optim.AdamConfig(lr=0.01, lambda_coef=0.1),
    "lamb": lambda: optim.LambConfig(lr=0.01),
}


def made(model: nn.Module, optimizer: str, batches: int = 1, **distributed: Any) -> ORTTrainer:
    description = {
        "inputs": [("x", ["batch", FEATURES]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("scores", ["batch", CLASSES])],
    }
    options = {
        "batch": {"gradient_accumulation_steps": batches},
        "utils": {"grad_norm_clip": False},
        "distributed": {"world_size": dist.get_world_size(), **distributed},
    }
    return ORTTrainer(
        model,
        description,
        CONFIGS[optimizer](),
        nn.CrossEntropyLoss(),
        ORTTrainerOptions(options),
    )


def train(trainer: ORTTrainer, steps: range) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in steps:
        random.seed(10 * step + rank)
        losses.append(trainer.train_step(*share(step, rank, size))[0].item())
    return losses


def train_in_ddp(model: nn.Module, optimizer: str, batches: int, steps: int) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    if isinstance(model, SparseTable):  # neither AdamW nor Gloo takes sparse gradients
        model.table.sparse = False
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    made_by = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1),
        "adam": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    }
    updates = made_by[optimizer](model.parameters())
    losses = []
    for step in range(steps):
        random.seed(10 * step + rank)
        x, label = share(step, rank, size)
        last = (step + 1) % batches == 0
        with contextlib.nullcontext() if last else parallel.no_sync():
            loss = nn.functional.cross_entropy(parallel(x), label)
            (loss / batches).backward()
        losses.append(loss.item())
        for buffer in model.buffers():  # DistributedDataParallel leaves that out under no_sync
            dist.broadcast(buffer, 0)
        if last:
            updates.step()
            updates.zero_grad(set_to_none=True)
    return losses


def run_both(kind: str, optimizer: str, batches: int, distributed: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    model = KINDS[kind]()
    other = copy.deepcopy(model)
    trainer = made(model, optimizer, batches, **distributed)
    losses = train(trainer, range(6))
    expected = train_in_ddp(other, optimizer, batches, 6)
    in_pieces = [capture.fallback for capture in trainer.report().captures if capture.fallback]
    return losses, expected, weights_of(trainer), dict(other.state_dict()), in_pieces


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("batches", "once", "stage"), [(1, False, 0), (1, False, 1), (2, False, 0), (3, True, 1)]
)
def test_as_distributed_data_parallel(
    group: Group, kind: str, optimizer: str, batches: int, once: bool, stage: int
) -> None:
    distributed = {
        "allreduce_post_accumulation": once,
        "deepspeed_zero_optimization": {"stage": stage},
    }
    results = group(2).run(run_both, kind, optimizer, batches, distributed)
    assert any(in_pieces for *_, in_pieces in results)
    first, second = (weights for _, _, weights, _, _ in results)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    for losses, expected, *_ in results:
        assert losses == pytest.approx(expected, abs=1e-5)
    for name, expected in results[0][3].items():
        torch.testing.assert_close(first[name], expected, rtol=1e-5, atol=1e-6)


def run_lamb_in_shares() -> None:
    torch.manual_seed(3)
    model = Experts()
    other = copy.deepcopy(model)
    plain, sharded = (
        made(model, "lamb"),
        made(other, "lamb", deepspeed_zero_optimization={"stage": 1}),
    )
    for trainer in (plain, sharded):
        train(trainer, range(5))
    weights = weights_of(plain)
    for name, tensor in weights_of(sharded).items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-6, atol=1e-7)


def test_norms_of_shares(group: Group) -> None:
    group(2).run(run_lamb_in_shares)


class Coded(ValueError):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code:d}")


class FailsInOneProcess(Counts):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        class Local(Exception):  # which cannot be pickled
            pass

        if dist.get_rank() == 1 and self.calls == 2:
            self.calls += 1
            raise {"index": IndexError("no row"), "coded": Coded(7), "local": Local("no row")}[
                self.kind
            ]
        return super().forward(x)


def run_failing(kind: str) -> tuple[str, bool, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    trainer = made(FailsInOneProcess(kind), "sgd")
    train(trainer, range(2))
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    text = "accepted"
    try:
        train(trainer, range(2, 3))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    same = all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    train(trainer, range(3, 5))
    return text, same, weights_of(trainer)


@pytest.mark.parametrize(
    ("kind", "own", "other"),
    [
        ("index", "IndexError: no row", "IndexError: process 1: no row"),
        ("coded", "Coded: code 7", "RuntimeError: process 1: code 7 (Coded)"),
        ("local", "Local: no row", "RuntimeError: process 1: no row (Local)"),
    ],
)
def test_where_one_process_fails_all_do(group: Group, kind: str, own: str, other: str) -> None:
    first, second = group(2).run(run_failing, kind)
    assert first[:2] == (other, True)
    assert second[:2] == (own, True)
    for name, tensor in first[2].items():
        assert torch.equal(tensor, second[2][name]), name


class MakesATable(Net):
    """Runs before it is captured, for what it makes; process 1 fails the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None
        self.runs = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs[0] += 1
        if dist.get_rank() == 1 and self.runs[0] == 2:
            raise IndexError("no row")
        return super().forward(x)


def run_failing_capture() -> str:
    trainer = made(MakesATable(), "sgd")
    try:
        train(trainer, range(1))
    except IndexError as error:
        return str(error)
    return "accepted"


def test_where_a_capture_fails_in_one_process_all_do(group: Group) -> None:
    assert group(2).run(run_failing_capture) == ["process 1: no row", "no row"]


class Chooses(nn.Module):
    """Trains both layers in pieces, or one of them in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(FEATURES, CLASSES)
        self.b = nn.Linear(FEATURES, CLASSES)
        self.calls = 0
        self.both = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.both:
            self.calls += 1
            return self.a(x) + self.b(x)
        return self.b(x)


def run_on_otherwise(folder: Path, once: bool) -> None:
    torch.manual_seed(3)
    trainer = made(Chooses(), "adam", 2, allreduce_post_accumulation=once)
    train(trainer, range(1))
    trainer.save_checkpoint(folder)
    other = made(Chooses(), "adam", 2, allreduce_post_accumulation=once)
    other.load_checkpoint(folder)
    for each in (trainer, other):
        each.model.both = False
        train(each, range(1, 4))
    weights = weights_of(trainer)
    for name, tensor in weights_of(other).items():
        # Means of what is kept are rounded.
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("once", [False, True])
def test_gradients_that_are_kept_are_used(group: Group, tmp_path: Path, once: bool) -> None:
    group(2).run(run_on_otherwise, tmp_path, once)


class Grows(Net):
    def __init__(self, in_pieces: bool) -> None:
        super().__init__()
        self.more = nn.ModuleList()
        self.in_pieces = in_pieces
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_pieces:
            self.calls += 1
            if self.calls == 3:
                self.late = nn.Parameter(torch.randn(FEATURES))
            if self.calls >= 3:
                x = x * self.late
        for layer in self.more:
            x = layer(x)
        return super().forward(x)


def run_growing(in_pieces: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    trainer = made(Grows(in_pieces), "adam")
    train(trainer, range(2))
    layer = nn.Linear(FEATURES, FEATURES)
    layer.register_buffer("note", torch.randn(3))
    layer.register_parameter("frozen", nn.Parameter(torch.randn(2), requires_grad=False))
    trainer.model.more.append(layer)
    train(trainer, range(2, 6))
    return weights_of(trainer)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_what_comes_later_starts_alike(group: Group, in_pieces: bool) -> None:
    first, second = group(2).run(run_growing, in_pieces)
    assert {"more.0.weight", "more.0.note", "more.0.frozen"} < first.keys()
    assert ("late" in first) is in_pieces
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def run_other_names() -> str:
    trainer = made(Grows(True), "sgd")
    train(trainer, range(1))
    if dist.get_rank() == 1:
        frozen = nn.Parameter(torch.randn(300), requires_grad=False)
        trainer.model.register_parameter("more_of_it", frozen)
    try:
        train(trainer, range(1, 2))
    except InvalidModelError as error:
        return str(error)
    return "accepted"


def test_other_names_are_refused(group: Group) -> None:
    first, second = group(2).run(run_other_names)
    shape = "((300,), 'torch.float32', False)"
    assert first == f"'more_of_it' is None in process 0, {shape} in process 1"
    assert second == f"'more_of_it' is {shape} in process 1, None in process 0"


def run_other_rates() -> str:
    trainer = made(Counts(), "sgd")
    train(trainer, range(1))
    trainer.optim_config.lr = 0.1 * (dist.get_rank() + 1)
    try:
        train(trainer, range(1, 2))
    except InvalidModelError as error:
        return str(error)
    return "accepted"


def test_other_rates_are_refused(group: Group) -> None:
    first, second = group(2).run(run_other_rates)
    assert first == "the learning rate is 0.1 in process 0, 0.2 in process 1"
    assert second == "the learning rate is 0.2 in process 1, 0.1 in process 0"


def run_from_checkpoint(folder: Path, once: bool, stage: int, before: int) -> None:
    given = {
        "allreduce_post_accumulation": once,
        "deepspeed_zero_optimization": {"stage": stage},
    }
    torch.manual_seed(3)
    trainer = made(Experts(), "adam", 2, **given)
    train(trainer, range(before))
    trainer.save_checkpoint(folder)
    losses = train(trainer, range(before, before + 4))
    other = made(Experts(), "adam", 2, **given)
    other.load_checkpoint(folder)
    assert train(other, range(before, before + 4)) == losses
    weights = weights_of(trainer)
    for name, tensor in weights_of(other).items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(("stage", "before"), [(0, 2), (0, 3), (1, 3)])
def test_goes_on_from_a_checkpoint(
    group: Group, tmp_path: Path, once: bool, stage: int, before: int
) -> None:
    group(2).run(run_from_checkpoint, tmp_path, once, stage, before)


class MakesPlaces(Net):
    """Makes a buffer as long as the batch, which is another one in each process."""

    def __init__(self, in_pieces: bool) -> None:
        super().__init__()
        self.in_pieces = in_pieces
        self.calls = 0
        self.register_buffer("places", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_pieces:
            self.calls += 1
        if self.places is None or len(self.places) != len(x):
            self.places = torch.arange(1.0, len(x) + 1) / len(x)
        return super().forward(x) * self.places[:, None]


def run_other_lengths(in_pieces: bool) -> list[tuple[float, float]]:
    torch.manual_seed(3)
    trainer = made(MakesPlaces(in_pieces), "sgd")
    losses = []
    for step, lengths in enumerate([(5, 8), (8, 5), (6, 6)]):
        x, label = share(step, 0, 1)
        x, label = x[: lengths[dist.get_rank()]], label[: lengths[dist.get_rank()]]
        expected = nn.functional.cross_entropy(copy.deepcopy(trainer.model)(x), label)
        losses.append((trainer.train_step(x, label)[0].item(), expected.item()))
    return losses


@pytest.mark.parametrize("in_pieces", [False, True])
def test_buffers_of_other_lengths_stay(group: Group, in_pieces: bool) -> None:
    for losses in group(2).run(run_other_lengths, in_pieces):
        for found, expected in losses:
            assert found == pytest.approx(expected, abs=1e-5)


def run_warned() -> list[str]:
    trainer = made(CountsInOneProcess(), "sgd")
    texts = []
    for step in range(2):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                train(trainer, range(step, step + 1))
            texts.append("done")
        except RuntimeWarning:
            texts.append("warned")
    return [*texts, str(trainer.train_step_info.optimization_step)]


def test_warnings_that_are_errors_keep_nobody_waiting(group: Group) -> None:
    first, second = group(2).run(run_warned)
    assert first[:2] == ["done", "done"]
    assert second[:2] == ["warned", "done"]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(FEATURES, CLASSES)
        self.b = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.shape[0] > 8 else self.b(x)


def run_strictly(batches: int) -> str:
    os.environ["ORTRAIN_STRICT"] = "1"
    try:
        trainer = made(Heads(), "sgd", batches)
        x, label = share(0, 0, 1)
        for step in range(2):
            rows = (12, 6)[dist.get_rank() if batches == 1 else step]
            trainer.train_step(x[:rows], label[:rows])
    except (InvalidModelError, UnsupportedError) as error:
        return str(error)
    finally:
        del os.environ["ORTRAIN_STRICT"]
    return "accepted"


@pytest.mark.parametrize(("batches", "text"), [(1, "in this step is"), (2, "train different")])
def test_strictly_nothing_runs_in_pieces(group: Group, batches: int, text: str) -> None:
    for found in group(2).run(run_strictly, batches):
        assert text in found


class MadeInEvaluation(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and not hasattr(self, "ones"):
            self.register_buffer("ones", torch.ones(len(x), CLASSES), persistent=False)
        return super().forward(x)


def run_evaluating_alone() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    trainer = made(MadeInEvaluation(), "sgd")
    train(trainer, range(1))
    if dist.get_rank() == 0:
        trainer.eval_step(*share(0, 0, 2))
    train(trainer, range(1, 3))
    return weights_of(trainer)


def test_one_process_may_evaluate_alone(group: Group) -> None:
    first, second = group(2).run(run_evaluating_alone)
    for name, tensor in second.items():
        assert torch.equal(tensor, first[name]), name
