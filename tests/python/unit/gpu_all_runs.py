# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs of lines of the list for GPUs, on the CPU, for its tests."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_all.__main__ import main
from benchmarks.gpu_all.line import Run
from ortrain import _core

PROVIDER = "simulator" if _core.gpu_platform() == "simulator" else "cpu"


def run(**changes: Any) -> Run:
    made = Run("cpu", PROVIDER, True, ("eager", "ortrain"), 1, time.monotonic() + 120)
    return dataclasses.replace(made, **changes)


def rehearsed(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    assert main(["--rehearse", "--output", str(tmp_path), *arguments]) == 0
    document = json.loads((tmp_path / "rehearsal.json").read_text())
    assert document["rehearsal"] is True and document["gpu"] is None
    for result in document["lines"].values():
        assert result["status"] == "rehearsed", result.get("error")
        assert all(aim["reached"] is None for aim in result["aims"])
    return document["lines"]
