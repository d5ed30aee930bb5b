# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters that begin later, or that steps leave out, have had fewer updates than others; optimizers count each one's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTTrainer, ORTTrainerOptions, _core, optim
from ortrain.optim import FusedLAMB

pytestmark = pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")

DESCRIPTION = {"inputs": [("x", ["batch", 4])], "outputs": [("loss", [], True)]}


class Net(nn.Module):
    """Of which layers may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Experts(Net):
    """Of which a batch reaches one or two, by its values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = int(x[0, 0].abs() * 100) % 3
        h = self.layers[first](x)
        if x[0, 1] > 0:
            h = h + self.layers[(first + 1) % 3](x)
        return h.square().mean()


Rule = tuple[Any, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]]
RULES: dict[str, Rule] = {
    "adam": (
        optim.AdamConfig(lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
    ),
    "adagrad": (
        optim.AdagradConfig(lr=0.01, lr_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    ),
    "sgd": (
        optim.SGDConfig(lr=0.01, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5),
    ),
    "lamb": (
        optim.LambConfig(lr=0.01, do_bias_correction=True),
        lambda p: FusedLAMB(p, lr=0.01, weight_decay=0.0),
    ),
}


class Pair:
    """A trainer, and the same model in PyTorch."""

    def __init__(self, kind: type[Net], rule: str, batches: int = 1, clips: bool = False) -> None:
        torch.manual_seed(0)
        self.model = kind()
        self.plain = copy.deepcopy(self.model)
        self.batches, self.count = batches, 0
        self.config, make = RULES[rule]
        options = {
            "utils": {"grad_norm_clip": clips},
            "batch": {"gradient_accumulation_steps": batches},
        }
        self.options = ORTTrainerOptions(options)
        self.trainer = self.trainer_of(self.model)
        self.optimizer, self.clips = make(self.plain.parameters()), clips

    def trainer_of(self, model: nn.Module) -> ORTTrainer:
        return ORTTrainer(model, DESCRIPTION, copy.deepcopy(self.config), options=self.options)

    def freeze(self, *frozen: int) -> None:
        for net in (self.model, self.plain):
            for i, layer in enumerate(net.layers):
                layer.requires_grad_(i not in frozen)

    def step(self) -> None:
        for _ in range(self.batches):
            x = torch.randn(6, 4)
            self.trainer.train_step(x)
            (self.plain(x) / self.batches).backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.plain.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for own, other in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("batches", "clips"), [(1, False), (2, True)])
def test_layers_that_begin_later(rule: str, batches: int, clips: bool) -> None:
    pair = Pair(Net, rule, batches, clips)
    for frozen in ((0, 1), (0,), (), (1,), (0, 2), ()):
        pair.freeze(*frozen)
        for _ in range(4):
            pair.step()
    counts = pair.trainer.engine.state.updates
    assert counts["layers.0.weight"] == 12 and counts["layers.2.bias"] == 20


@pytest.mark.parametrize("rule", RULES)
def test_experts_in_pieces(rule: str) -> None:
    pair = Pair(Experts, rule)
    for _ in range(20):
        pair.step()
    assert len(set(pair.trainer.engine.state.updates.values())) > 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [Net, Experts])
@pytest.mark.parametrize("by", ["checkpoint", "state", "arrays"])
def test_counts_are_kept(rule: str, kind: type[Net], by: str, tmp_path: Path) -> None:
    pair = Pair(kind, rule)
    for frozen in ((0, 1), (1,)):
        pair.freeze(*frozen)
        for _ in range(3):
            pair.step()
    pair.freeze()
    before = pair.trainer.engine.state.updates
    model = copy.deepcopy(pair.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    other = pair.trainer_of(model)
    if by == "checkpoint":
        pair.trainer.save_checkpoint(tmp_path)
        other.load_checkpoint(tmp_path)
    else:
        state = pair.trainer.state_dict()
        if by == "arrays":
            for kinds in state["optimizer"].values():
                kinds.update({name: tensor.numpy() for name, tensor in kinds.items()})
        other.load_state_dict(state)
    pair.model, pair.trainer = model, other
    after = other.engine.state.updates
    assert {n: after.get(n, 0) for n in before} == before
    for _ in range(3):
        pair.step()


def test_a_program_is_made_anew_once_for_each_number_of_updates() -> None:
    pair = Pair(Net, "adam")
    pair.freeze(0, 1)
    pair.step()
    pair.freeze()
    pair.step()
    program = pair.trainer.engine._training[-1].runs
    numbers = [
        each["target"]
        for each in program.graph("whole").inputs
        if "optimizer:step" in each["target"]
    ]
    assert sorted(numbers) == ["optimizer:step", "optimizer:step:1"]
    for _ in range(3):
        pair.step()
    assert program is pair.trainer.engine._training[-1].runs


def test_a_checkpoint_says_nothing_of_counts_that_are_those_of_all(tmp_path: Path) -> None:
    pair = Pair(Net, "adam")
    pair.step()
    path = pair.trainer.save_checkpoint(tmp_path)
    manifest = next(Path(path or tmp_path).rglob("manifest.json")).read_text()
    assert '"updates"' not in manifest
    pair.freeze(0)
    pair.step()
    pair.trainer.save_checkpoint(tmp_path)
    manifests = [file.read_text() for file in tmp_path.rglob("manifest.json")]
    assert any('"updates"' in text for text in manifests)
    state = _core.TrainingState()
    assert state.updates == {}


def test_a_file_of_a_whole_step_changes_no_counts(tmp_path: Path) -> None:
    pair = Pair(Net, "adam")
    pair.freeze(0)
    for _ in range(3):
        pair.step()
    pair.trainer.save_checkpoint(tmp_path / "checkpoints")
    model = copy.deepcopy(pair.model)
    other = pair.trainer_of(model)
    other.load_checkpoint(tmp_path / "checkpoints")
    pair.model, pair.trainer = model, other
    pair.freeze()
    other.eval_step(torch.ones(6, 4))
    other.save_as_onnx(tmp_path / "step.onnx", training=True)
    graph = _core.load_onnx(str(tmp_path / "step.onnx"))
    numbers = [i["target"] for i in graph.inputs if "optimizer:step" in i["target"]]
    assert sorted(numbers) == ["optimizer:step", "optimizer:step:1"]
    other.save_checkpoint(tmp_path / "later")
    third = pair.trainer_of(copy.deepcopy(model))
    third.load_checkpoint(tmp_path / "later")
    counts = third.engine.state.updates
    assert (counts["layers.0.weight"], counts["layers.1.weight"]) == (0, 3)
    for _ in range(3):
        pair.step()
