# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainer of modules that no graph holds whole: as PyTorch trains them, checkpoints and refusals included."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTTrainer, ORTTrainerOptions, optim
from ortrain.amp import DynamicLossScaler
from ortrain.errors import CaptureError, InvalidModelError

DESCRIPTION = {
    "inputs": [("x", ["batch", 6]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("scores", ["batch", 4])],
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.second = nn.Linear(40, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class BranchesOnValues(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = -x
        return super().forward(x)


class BranchesInTheMiddle(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if not torch.isfinite(hidden).all() or hidden.max() > 1:
            hidden = hidden.clamp(-1, 1)
        return self.second(hidden)


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.zeros(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return self.second(hidden + self.mean) / self.calls


class SkipsLayers(Net):
    """Of which a batch trains one layer or two, by a draw of Python's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        if random.random() < 0.5:
            first = first.detach()
        return self.second(first)


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, sparse=True)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 7).long() % 11
        if x[0, 0] > 0:
            ids = ids.flip(1)
        return self.table(ids).mean(1) * self.scale


class MadeByTheFirstCall(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.sum() > 1e6:
            hidden = hidden * 0
        return self.second(hidden)


def batch(seed: int, size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator)
    return x, torch.randint(0, 4, (size,), generator=generator)


def adam() -> Any:
    return optim.AdamConfig(lr=0.01, lambda_coef=0.1)


def torch_adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 0.01, weight_decay=0.1)


def made(module: nn.Module, config: Any = None, **groups: Any) -> ORTTrainer:
    groups.setdefault("utils", {"grad_norm_clip": False})
    config = config if config is not None else adam()
    options = ORTTrainerOptions(groups)
    return ORTTrainer(module, DESCRIPTION, config, nn.CrossEntropyLoss(), options)


def assert_same(a: nn.Module, b: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "kind", [BranchesOnValues, BranchesInTheMiddle, Counts, SparseTable, MadeByTheFirstCall]
)
def test_follows_pytorch(kind: Callable[[], nn.Module], accumulation: int) -> None:
    torch.manual_seed(0)
    model = kind()
    if kind is MadeByTheFirstCall:
        model(batch(0)[0])
    other = copy.deepcopy(model)
    trainer = made(model, batch={"gradient_accumulation_steps": accumulation})
    optimizer = torch_adam(other)
    if kind is SparseTable:  # AdamW of PyTorch takes dense gradients alone
        other.table.sparse = False
    with pytest.warns(RuntimeWarning, match=f"{kind.__name__} runs in"):
        loss, scores = trainer.train_step(*batch(0))
    for step in range(2 * accumulation):
        x, label = batch(step)
        if step > 0:
            loss, scores = trainer.train_step(x, label)
        expected_scores = other(x)
        expected = nn.functional.cross_entropy(expected_scores, label)
        (expected / accumulation).backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(scores, expected_scores.detach(), rtol=1e-5, atol=1e-6)
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, other)
    assert all(p.grad is None for p in model.parameters())
    assert trainer.train_step_info.optimization_step == 2
    x, label = batch(9)
    loss, _ = trainer.eval_step(x, label)
    with torch.no_grad():
        torch.testing.assert_close(loss, nn.functional.cross_entropy(other(x), label))


def test_parameters_without_gradients_stay_and_count_no_steps_of_their_own() -> None:
    torch.manual_seed(0)
    model = SkipsLayers()
    other = copy.deepcopy(model)
    trainer = made(model, optim.SGDConfig(lr=0.1))
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for step in range(8):
        x, label = batch(step)
        random.seed(step)
        trainer.train_step(x, label)
        random.seed(step)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(other(x), label).backward()
        optimizer.step()
    assert_same(model, other)


def test_batches_of_a_step_may_reach_different_parameters() -> None:
    torch.manual_seed(0)
    model = SkipsLayers()
    other = copy.deepcopy(model)
    trainer = made(model, batch={"gradient_accumulation_steps": 2})
    optimizer = torch_adam(other)
    for step in range(8):
        x, label = batch(step)
        random.seed(step)
        trainer.train_step(x, label)
        random.seed(step)
        (nn.functional.cross_entropy(other(x), label) / 2).backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert_same(model, other)


def test_steps_that_fail_leave_nothing_for_the_next() -> None:
    torch.manual_seed(0)
    model = BranchesOnValues()
    trainer = made(model, optim.SGDConfig(lr=0.1))
    trainer.train_step(*batch(0))
    trainer.engine._pieces.optimizer_of = lambda trained: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train_step(*batch(1))
    del trainer.engine._pieces.optimizer_of
    other = copy.deepcopy(model)
    x, label = batch(2)
    trainer.train_step(x, label)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    nn.functional.cross_entropy(other(x), label).backward()
    optimizer.step()
    assert_same(model, other)


def test_layers_of_other_shapes_and_types() -> None:
    torch.manual_seed(0)
    model = BranchesOnValues()
    trainer = made(model, optim.SGDConfig(lr=0.1))
    trainer.train_step(*batch(0))
    model.first, model.second = nn.Linear(6, 20), nn.Linear(20, 4)
    trainer.train_step(*batch(1))
    model.double()
    x, label = batch(2)
    other = copy.deepcopy(model)
    trainer.train_step(x.double(), label)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    nn.functional.cross_entropy(other(x.double()), label).backward()
    optimizer.step()
    assert_same(model, other)


def test_programs_of_optimizers_are_bounded() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
            self.last = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if random.random() < 0.5:
                    x = layer(x)
            return self.last(x)

    trainer = made(Skips())
    for seed in range(30):
        random.seed(seed)
        trainer.train_step(*batch(seed))
    assert 4 < len(trainer.engine._pieces._optimizers) <= 16


def test_gradients_of_earlier_steps_are_not_added_to() -> None:
    """Whole graphs leave theirs behind; a later step's second batch reaches what its first did not."""

    class Chooses(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(6, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 5:  # a graph
                return self.second(self.first(x) + self.other(x))
            hidden = self.first(x) if x.sum() > 0 else self.other(x)
            return self.second(hidden)

    torch.manual_seed(0)
    model = Chooses()
    other = copy.deepcopy(model)
    trainer = made(model, batch={"gradient_accumulation_steps": 2})
    optimizer = torch_adam(other)
    x, label = batch(0, 4)
    batches = [batch(1), batch(2), (x.abs(), label), (-x.abs(), label)]
    for step, (inputs, labels) in enumerate(batches * 2):
        trainer.train_step(inputs, labels)
        (nn.functional.cross_entropy(other(inputs), labels) / 2).backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert_same(model, other)


def test_frozen_parameters_and_gradients_of_the_user_stay() -> None:
    model = BranchesOnValues()
    model.second.bias.requires_grad_(False)
    trainer = made(model, utils={"grad_norm_clip": True, "frozen_weights": ["first.bias"]})
    own = torch.randn(40, 6)
    model.first.weight.grad = own
    kept = own.clone()
    before = copy.deepcopy(model.state_dict())
    trainer.train_step(*batch(0))
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {"first.weight", "second.weight"}
    assert model.first.weight.grad is own
    assert torch.equal(own, kept)


def test_clipping_groups_and_lamb() -> None:
    """The optimizer alone does what it does in the graph of a whole step."""
    torch.manual_seed(0)
    model, other = BranchesOnValues(), Net()
    other.load_state_dict(model.state_dict())
    trainers = []
    for module in (model, other):
        groups = [{"params": ["first.bias", "second.weight"], "lambda_coef": 0.0}]
        config = optim.LambConfig(groups, lr=0.01, lambda_coef=0.1, max_norm_clip=0.1)
        trainers.append(made(module, config, utils={}))
    for step in range(3):
        x, label = batch(step)
        x = -x.abs()  # no branch is taken
        assert torch.equal(trainers[0].train_step(x, label)[0], trainers[1].train_step(x, label)[0])
    assert_same(model, other, 1e-6)
    in_pieces, whole = (trainer.report().captures[0] for trainer in trainers)
    assert in_pieces.fallback
    assert not whole.fallback
    assert whole.native_nodes > 0


def test_loss_scale_and_16_bits() -> None:
    torch.manual_seed(0)
    model = BranchesOnValues()
    other = copy.deepcopy(model)
    scaler = DynamicLossScaler(loss_scale=1024.0)
    trainer = made(
        model, mixed_precision={"enabled": True, "dtype": "bfloat16", "loss_scaler": scaler}
    )
    optimizer = torch_adam(other)
    for step in range(4):
        x, label = batch(step)
        trainer.train_step(x, label)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(other(x), label)
        (loss * 1024).backward()
        for p in other.parameters():
            p.grad /= 1024
        optimizer.step()
    assert_same(model, other, 2e-3)
    before = copy.deepcopy(model.state_dict())
    trainer.train_step(torch.full((5, 6), float("inf")), batch(0)[1])
    assert not trainer.train_step_info.all_finite
    assert scaler.loss_scale == 512.0
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("batches", [2, 3])
def test_checkpoints_go_on(tmp_path: Any, batches: int) -> None:
    torch.manual_seed(0)
    model = BranchesInTheMiddle()
    other = copy.deepcopy(model)
    accumulation = {"gradient_accumulation_steps": 2}
    trainer = made(model, batch=accumulation)
    for step in range(batches):
        trainer.train_step(*batch(step))
    trainer.save_checkpoint(tmp_path)
    again = made(other, batch=accumulation)
    again.load_checkpoint(tmp_path)
    for step in range(batches, batches + 3):
        a, _ = trainer.train_step(*batch(step))
        b, _ = again.train_step(*batch(step))
        assert torch.equal(a, b)
    assert_same(model, other, 0)


def test_whole_graphs_and_pieces_take_turns() -> None:
    class ByMode(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and x.sum() > 0:
                x = -x
            return super().forward(x)

    torch.manual_seed(0)
    trainer = made(ByMode())
    x, label = batch(0)
    trainer.train_step(x, label)
    loss, _ = trainer.eval_step(x, label)
    torch.testing.assert_close(
        loss, nn.functional.cross_entropy(Net.forward(trainer.model, x), label).detach()
    )
    fallbacks = {record.training: record.fallback for record in trainer.report().captures}
    assert fallbacks[True]
    assert not fallbacks[False]


def test_a_call_that_fails_leaves_later_ones_whole() -> None:
    class Halves(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.view(5, 6))

    trainer = made(Halves())
    with pytest.raises(RuntimeError, match="shape"):
        trainer.train_step(*batch(0, 7))
    trainer.train_step(*batch(0))
    assert not any(record.fallback for record in trainer.report().captures if record.training)


def test_state_that_the_forward_changes_takes_no_memory_of_steps() -> None:
    trainer = made(Counts())
    for step in range(40):
        trainer.train_step(*batch(step))
    assert trainer.model.calls == 40
    assert len(trainer._source._states._guards) <= 2


def test_where_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for groups in (
        {"device": {"mem_limit": 1 << 30}},
        {"device": {"max_memory": "0.5x"}},
        {"mixed_precision": {"enabled": True, "allow": ["MatMul"]}},
    ):
        with pytest.raises(CaptureError, match="depends on the values"):
            made(BranchesOnValues(), **groups).train_step(*batch(0))
    trainer = made(BranchesOnValues())
    trainer.train_step(*batch(0))
    with pytest.raises(CaptureError, match="depends on the values"):
        trainer.save_as_onnx("unwritten.onnx")
    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    with pytest.raises(CaptureError, match="depends on the values"):
        made(BranchesOnValues()).train_step(*batch(0))


def test_losses_that_are_none() -> None:
    class Fixed(BranchesOnValues):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).detach()

    with pytest.raises(InvalidModelError, match="depends on no parameter that is trained"):
        made(Fixed()).train_step(*batch(0))
    options = ORTTrainerOptions({})
    each = nn.CrossEntropyLoss(reduction="none")
    trainer = ORTTrainer(BranchesOnValues(), DESCRIPTION, adam(), each, options)
    with pytest.raises(InvalidModelError, match=r"'loss' is float32\[5\], expected a single float"):
        trainer.train_step(*batch(0))
