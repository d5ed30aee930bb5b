# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs the same scenario with transformers' Trainer and with ours, and compares all that it leaves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainer_models import padded
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ortrain import ORTModule
from ortrain.hf import (
    ORTSeq2SeqTrainer,
    ORTSeq2SeqTrainingArguments,
    ORTTrainer,
    ORTTrainingArguments,
)

# What differs from run to run.
_TIMES = ("runtime", "per_second", "preparation_time")
_EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two trainers, with the folder that it writes to."""

    trainer: Any
    arguments: Any
    folder: Path
    ours: bool

    def make(self, model: Any, data: Any, *, name: str = "run", **given: Any) -> Any:
        """Return a trainer; options that TrainingArguments has go there, the others to it."""
        options = {
            "output_dir": str(self.folder / name),
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 8,
            "max_steps": 12,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": [],
            "seed": 7,
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
        }
        known = self.arguments.__dataclass_fields__
        options |= {k: v for k, v in given.items() if k in known}
        others = {k: v for k, v in given.items() if k not in known}
        others.setdefault("data_collator", padded)
        return self.trainer(
            model=model, args=self.arguments(**options), train_dataset=data, **others
        )


@dataclasses.dataclass
class Outcome:
    """What a run leaves.

    Attributes:
      log: The trainer's log_history, without times.
      state: The rest of TrainerState.
      weights: The model's state_dict.
      values: What the scenario looks at beside that: numbers, arrays, lists, strings.
      files: Paths of all files below the output folder.
    """

    log: list[dict[str, Any]]
    state: dict[str, Any]
    weights: dict[str, torch.Tensor]
    values: dict[str, Any]
    files: list[str]


def sides(folder: Path, *, seq2seq: bool = False) -> tuple[Side, Side]:
    """Return transformers' side and ours."""
    theirs = (Seq2SeqTrainer, Seq2SeqTrainingArguments) if seq2seq else (Trainer, TrainingArguments)
    ours = (
        (ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments)
        if seq2seq
        else (ORTTrainer, ORTTrainingArguments)
    )
    return Side(*theirs, folder / "theirs", ours=False), Side(*ours, folder / "ours", ours=True)


def outcome(trainer: Any, **values: Any) -> Outcome:
    """Collect what a trainer's run has left."""
    state = json.loads(json.dumps(dataclasses.asdict(trainer.state), default=str))
    log = [_without_times(entry) for entry in state.pop("log_history")]
    for name in ("best_model_checkpoint", "trial_name", "stateful_callbacks"):
        if isinstance(state.get(name), str):
            state[name] = Path(state[name]).name
    folder = Path(trainer.args.output_dir)
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    weights = {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}
    return Outcome(log, state, weights, values, files)


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in entry.items() if not any(t in k for t in _TIMES)}


def compare(theirs: Outcome, ours: Outcome, *, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Raise AssertionError where the two runs differ.

    Args:
      theirs: What transformers' Trainer left.
      ours: What ours left.
      rtol: Bound of losses, norms, rates and values, relative.
      atol: Bound of weights, and of values that may be 0.
    """
    assert len(theirs.log) == len(ours.log)
    for a, b in zip(theirs.log, ours.log, strict=True):
        assert list(a) == list(b), (list(a), list(b))
        for key in a:
            _close(a[key], b[key], key, rtol, 1e-7)
    assert theirs.state.keys() == ours.state.keys()
    for key in theirs.state:
        _close(theirs.state[key], ours.state[key], key, rtol, 1e-7)
    assert theirs.files == ours.files
    assert theirs.weights.keys() == ours.weights.keys()
    for name, tensor in theirs.weights.items():
        assert torch.allclose(tensor, ours.weights[name], rtol=rtol, atol=atol), (
            name,
            (tensor - ours.weights[name]).abs().max().item(),
        )
    assert theirs.values.keys() == ours.values.keys()
    for key in theirs.values:
        _close(theirs.values[key], ours.values[key], key, rtol, atol)


def _close(a: Any, b: Any, path: str, rtol: float, atol: float) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            _close(a[key], b[key], f"{path}.{key}", rtol, atol)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _close(x, y, f"{path}.{i}", rtol, atol)
    elif isinstance(a, (float, np.ndarray, torch.Tensor)) and not isinstance(a, bool):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=rtol, atol=atol, err_msg=path)
    else:
        assert a == b, (path, a, b)


def on_engine(trainer: Any) -> ORTModule:
    """Return the ORTModule that a trainer trained, after checking that it ran on the engine.

    A model that branches on random numbers, as BART's dropping of layers did up to transformers
    5.22, runs there in pieces.
    """
    module = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    assert isinstance(module, ORTModule), type(module)
    captures = module.report().captures
    assert captures
    assert all(r.pieces or not r.fallback for r in captures), [r.fallback for r in captures]
    return module


class EventRecorder(TrainerCallback):
    """Writes down the events in their order."""

    def __init__(self) -> None:
        self.events: list[str] = []


def _recording(name: str) -> Callable[..., None]:
    def event(self: EventRecorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        known = ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
        given = [k for k in known if kwargs.get(k) is not None]
        self.events.append(f"{name} {state.global_step} {' '.join(given)}")

    return event


for _name in _EVENTS:
    setattr(EventRecorder, _name, _recording(_name))
