# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Processes that die or are asked to end, started by torchrun."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "elastic.py"
TIMEOUT = 150.0


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "3", str(EXAMPLE)]
    return subprocess.Popen(
        [*command, "--checkpoints", str(folder), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Return the output of a run that must end well; kill it with its children otherwise."""
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return output


def newest(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"))


@pytest.mark.long
@pytest.mark.slow
def test_goes_on_after_a_process_was_killed(tmp_path: Path) -> None:
    options = ["--steps", "12", "--every", "3"]
    broken = start(tmp_path / "broken", *options, "--lose-process-at", "7")
    output = finish(broken)
    assert "attempt 0 goes on from step 0" in output
    assert "attempt 1 goes on from step 6" in output
    finish(start(tmp_path / "whole", *options))
    for name in ("parameters.safetensors", "optimizer.safetensors"):
        expected = (newest(tmp_path / "whole") / name).read_bytes()
        assert (newest(tmp_path / "broken") / name).read_bytes() == expected
    assert len(list((tmp_path / "broken").glob("checkpoint-*"))) == 2


def workers_of(launcher: int) -> list[int]:
    """Return the processes that a process has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    return [
        int(child)
        for child in children.split()
        if b"elastic.py" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not list(folder.glob("checkpoint-*/manifest.json")):
        assert process.poll() is None, "ended too early"
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.long
def test_saves_and_ends_when_one_is_asked_to(tmp_path: Path) -> None:
    process = start(tmp_path, "--steps", "1000000", "--every", "50")
    try:
        wait_for_checkpoint(tmp_path, process)
        asked = time.time()
        os.kill(workers_of(process.pid)[-1], signal.SIGTERM)
        output = finish(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    saved = (newest(tmp_path) / "manifest.json").stat().st_mtime
    _log.info("saved %.2f s after the signal", saved - asked)
    steps = int(output.rsplit("step ", 1)[1].split(":")[0])
    more = finish(start(tmp_path, "--steps", str(steps + 1)))
    assert f"attempt 0 goes on from step {steps}" in more


@pytest.mark.slow
@pytest.mark.long
def test_saves_when_the_launcher_is_asked_to_end(tmp_path: Path) -> None:
    process = start(tmp_path, "--steps", "1000000", "--every", "1000000")
    try:
        deadline = time.monotonic() + TIMEOUT
        while len(workers_of(process.pid)) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        line = process.stdout.readline()
        while "goes on from step 0" not in line:
            assert line, "ended too early"
            line = process.stdout.readline()
        time.sleep(2.0)  # into the loop
        asked = time.time()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    saved = (newest(tmp_path) / "manifest.json").stat().st_mtime
    _log.info("saved %.2f s after the signal", saved - asked)
