# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""DebugOptions, and variables for the former ORTModule."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from ortrain import FileError, debug_options
from ortrain.json_config import load_from_json
from ortrain.ortmodule import DebugOptions, LogLevel, ORTModule


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(str(path)).graph.node]


def test_graphs_are_written_as_they_are_captured(tmp_path: Path) -> None:
    model = ORTModule(
        nn.Sequential(nn.Linear(3, 3), nn.GELU()),
        DebugOptions(save_onnx=True, onnx_prefix="net", save_path=tmp_path),
    )
    x = torch.ones(2, 3)
    model(x).sum().backward()
    stages = ["execution_model", "optimized", "optimized_pre_grad", "torch_exported"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"net_{s}_training.onnx" for s in stages
    )
    with torch.no_grad():
        model.eval()(x)
    assert len(list(tmp_path.glob("net_*_inference.onnx"))) == 3
    before, after = (
        operators(tmp_path / f"net_{s}_training.onnx") for s in ("torch_exported", "optimized")
    )
    assert len(after) > len(before)
    assert operators(tmp_path / "net_optimized_pre_grad_training.onnx") == before
    copied = copy.deepcopy(model)
    assert copied._ortrain_engine.saves == (tmp_path, "net")


def test_variables_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    options = DebugOptions(LogLevel.INFO, save_onnx=True, onnx_prefix="a", save_path="elsewhere")
    assert options.log_level is LogLevel.ERROR
    assert options.save_onnx_models.path == tmp_path
    logger = logging.getLogger("ortrain")
    before = logger.level
    try:
        ORTModule(nn.Linear(1, 1), options)
        assert not logger.isEnabledFor(logging.WARNING) and logger.isEnabledFor(logging.ERROR)
    finally:
        logger.setLevel(before)
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "LOUD")
    with pytest.raises(ValueError, match="'LOUD'; there are VERBOSE"):
        DebugOptions()


def test_variables_without_meaning_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(debug_options, "_told", set())
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", "/tmp/x")
    monkeypatch.setenv("ORTMODULE_SOMETHING", "1")
    for _ in range(2):
        ORTModule(nn.Linear(1, 1))
    said = [r.getMessage() for r in caplog.records if "ORTMODULE" in r.getMessage()]
    assert said == [
        "ORTMODULE_CACHE_DIR has no effect: set ORTRAIN_CACHE_DIR",
        "ORTMODULE_SOMETHING has no effect: there is nothing like it",
    ]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="debug_options is 3"):
        ORTModule(nn.Linear(1, 1), 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="log_level is 1"):
        DebugOptions(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="onnx_prefix must be given"):
        DebugOptions(save_onnx=True)
    with pytest.raises(FileError, match="nothing can be written"):
        DebugOptions(save_onnx=True, onnx_prefix="a", save_path=tmp_path / "none")


def test_options_come_from_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"SaveONNX": True, "ONNXPrefix": "net", "SaveONNXPath": str(tmp_path / "graphs")}
    (tmp_path / "graphs").mkdir()
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"DebugOptions": saved, "UseStaticShape": True, "SkipCheck": []}))
    model = ORTModule(nn.Linear(2, 2))
    load_from_json(model, file)
    assert [r.getMessage() for r in caplog.records] == [
        f"'UseStaticShape' in {file} has no effect: each shape has a plan of its own",
        f"'SkipCheck' in {file} has no effect: checks are not skipped, and take microseconds",
    ]
    model(torch.ones(1, 2))
    assert (tmp_path / "graphs" / "net_torch_exported_training.onnx").exists()
    assert copy.deepcopy(model)._ortrain_engine.saves == (tmp_path / "graphs", "net")

    other = tmp_path / "other.json"
    other.write_text(json.dumps({"DebugOptions": {**saved, "ONNXPrefix": "other"}}))
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", str(other))
    load_from_json(model, file)
    assert model._ortrain_engine.saves == (tmp_path / "graphs", "other")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", FileError, "options.json: "),
        ("[" * 100_000, FileError, "options.json: "),
        ("[]", ValueError, "holds a list, expected an object"),
        ('{"Colour": 1}', ValueError, "unknown key 'Colour'; there are AllowLayerNorm"),
        ('{"UseStaticShape": 1}', ValueError, "'UseStaticShape' is 1, expected a bool"),
        ('{"DebugOptions": true}', ValueError, "'DebugOptions' is True, expected a dict"),
        ('{"DebugOptions": {"Log": 1}}', ValueError, "unknown key 'DebugOptions.Log'"),
        ('{"DebugOptions": {"LogLevel": "LOUD"}}', ValueError, "is 'LOUD'; there are VERBOSE"),
        ('{"DebugOptions": {"SaveONNX": true}}', ValueError, "onnx_prefix must be given"),
    ],
)
def test_files_are_refused(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text(text)
    model = ORTModule(nn.Linear(2, 2))
    with pytest.raises(error, match=message):
        load_from_json(model, file)
    assert model._ortrain_engine.saves is None


def test_a_file_and_a_module_are_needed(tmp_path: Path) -> None:
    module: Any = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="of type Linear, expected an ORTModule"):
        load_from_json(module, tmp_path / "options.json")
    with pytest.raises(ValueError, match="variable ORTMODULE_JSON_CONFIG_PATH"):
        load_from_json(ORTModule(module))
    with pytest.raises(FileError, match="No such file"):
        load_from_json(ORTModule(module), tmp_path / "nothing.json")
