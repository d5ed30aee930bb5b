# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Lines in parts of some minutes: lanes, options, what is kept of a line that is ended."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_all import parts
from benchmarks.gpu_all.__main__ import LINES


def test_parts_name_lines_that_there_are() -> None:
    keys = {each.key for each in LINES}
    for name, part in parts.PARTS.items():
        named = [key for lane in part.lanes for key in lane]
        assert set(named) <= keys and len(named) == len(set(named)), name
        assert part.seconds <= 570, "a command has ten minutes"
    assert {key for part in parts.PARTS.values() for lane in part.lanes for key in lane} == keys


def test_lanes_go_on_after_a_line_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_CHECK_KERNELS", "/nowhere/program")
    output = tmp_path / "out"
    lanes = ["--lane", "op-cases,found", "--rehearse", "--seconds", "100"]
    assert parts.main([*lanes, "--output", str(output)]) == 0
    made = json.loads((output / "lines.json").read_text())
    assert set(made) == {"op-cases", "found"}
    assert all(each["status"] == "failed" for each in made.values())
    assert "/nowhere/program is missing" in made["op-cases"]["error"]
    assert "=== found" in (output / "log.txt").read_text()


def test_line_that_overruns_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "KILLED_AFTER", -3.0)
    results = parts.Results(tmp_path)
    parts.run_line("found", ["--rehearse"], 3.1, results)
    made = json.loads((tmp_path / "lines.json").read_text())
    assert made["found"] == {
        "status": "failed",
        "error": "no result, status None",
        "whole seconds": made["found"]["whole seconds"],
    }


def test_options_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(parts, "run_lanes", lambda *arguments: given.extend(arguments[:3]))
    monkeypatch.setattr(parts.Results, "__init__", lambda self, folder: None)
    (tmp_path / "lines.json").write_text("{}")
    output = ["--output", str(tmp_path)]
    more = ["--rounds", "3", "--peers", "eager,ortrain", "--device", "cuda:1", "--profile"]
    assert parts.main(["--lane", "gpt2", "--seconds", "200", *more, *output]) == 0
    assert given[:2] == [[["gpt2"]], 200.0]
    assert given[2] == [
        *("--peers", "eager,ortrain", "--rounds", "3", "--device", "cuda:1", "--profile")
    ]
    given.clear()
    assert parts.main(["E", "--peers", "ortrain", *output]) == 0
    assert given[2] == ["--peers", "eager,ortrain", "--peers", "ortrain"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lane", "gpt2", "--turns", "3"],
        ["--lane", "gpt2,gpt5"],
        ["--lane", "gpt2", "--peers", "jax,ortrain"],
        ["--lane", "gpt2", "--rounds", "0"],
        ["C", "--lane", "gpt2"],
        ["Z"],
        [],
    ],
)
def test_parts_refuse_before_anything_runs(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    with pytest.raises(SystemExit) as refused:
        parts.main([*arguments, "--output", str(output)])
    assert refused.value.code == 2 and not output.exists()
    assert "--turns" not in arguments or "unknown option: --turns" in capsys.readouterr().err


def test_line_that_is_ended_keeps_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "POLL", 0.05)
    written = tmp_path / "gpu.json"
    script = (
        "import pathlib, time\n"
        f'pathlib.Path({str(written)!r}).write_text(\'{{"lines": {{"a": {{"x": 1}}}}}}\')\n'
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    results = parts.Results(tmp_path / "out")
    status = parts._followed(process, time.monotonic() + 2, tmp_path, "a", results)
    assert status is None and process.poll() is not None
    assert json.loads((tmp_path / "out" / "lines.json").read_text()) == {"a": {"x": 1}}


def test_no_line_is_begun_without_time(tmp_path: Path) -> None:
    parts.run_lanes([["found"]], 1.0, [], parts.Results(tmp_path))
    made = json.loads((tmp_path / "lines.json").read_text())
    assert made["found"]["status"] == "not run"
