# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Names of the ancestor's: each leads somewhere, and programs are told of those that they use."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ortrain import legacy
from ortrain.tools.command import app
from ortrain.tools.migrate import changes


def _resolve(name: str) -> Any:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


def test_each_name_leads_to_something_or_says_why_not() -> None:
    assert len({each.name for each in legacy.NAMES}) == len(legacy.NAMES)
    for each in legacy.NAMES:
        assert legacy.is_below_roots(each.name), each
        if each.ours:
            assert _resolve(each.ours) is not None, each
        if each.state != "same":
            assert each.note or each.ours, each


def test_a_program_is_told_of_what_it_names() -> None:
    program = """
import onnxruntime as ort
import onnxruntime.training as training
from onnxruntime.training import ORTTrainer, amp, optim as o
from onnxruntime.training.ortmodule import ORTModule as Wrapped
from onnxruntime.training.utils.hooks import ZeROOffloadSubscriber
from . import local

session = ort.InferenceSession("a.onnx")
config = o.lr_scheduler.LinearWarmupLRScheduler(10)
scaler = training.amp.DynamicLossScaler()
trainer = ORTTrainer(1)
trainer.train_step(), Wrapped.forward, training.nothing.like_this
"""
    told = [(c.line, c.name.removeprefix("onnxruntime.training"), c.ours) for c in changes(program)]
    assert told == [
        (3, "", "ortrain"),
        (4, ".ORTTrainer", "ortrain.ORTTrainer"),
        (4, ".amp", "ortrain.amp"),
        (4, ".optim", "ortrain.optim"),
        (5, ".ortmodule.ORTModule", "ortrain.ORTModule"),
        (6, ".utils.hooks.ZeROOffloadSubscriber", ""),
        (
            10,
            ".optim.lr_scheduler.LinearWarmupLRScheduler",
            "ortrain.optim.lr_scheduler.LinearWarmupLRScheduler",
        ),
        (11, ".amp.DynamicLossScaler", "ortrain.amp.DynamicLossScaler"),
        (13, ".nothing.like_this", ""),
    ]


@pytest.mark.parametrize(
    ("text", "status", "printed"),
    [
        ("import torch\n", 0, ""),
        ("from onnxruntime.training import ORTTrainer\n", 0, "-> ortrain.ORTTrainer"),
        ("import optimum.onnxruntime.trainer as t\nt.ModuleWithLoss\n", 0, "ortrain.hf.ModuleWithLoss"),
        ("from onnxruntime.training import *\n", 1, "import by name"),
        ("def broken(:\n", 2, "invalid syntax"),
        ("x = '\\ud800'\n\0", 2, "null bytes"),
    ],
)  # fmt: skip
def test_the_command_prints_lines(tmp_path: Path, text: str, status: int, printed: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(text)
    result = CliRunner().invoke(app, ["migrate", str(file)])
    assert result.exit_code == status, result.output
    assert printed in result.output
