# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The examples of other libraries' trainers and of several processes, with few steps."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(*command: object) -> str:
    """Return what a program prints; with all that it printed where it fails."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(*command: object) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return run(*launcher, "--master-port", port, *command)


@pytest.mark.parametrize(
    "name", ["accelerate_digits", pytest.param("lightning_digits", marks=pytest.mark.long)]
)
def test_digits(name: str) -> None:
    printed = run(sys.executable, EXAMPLES / f"{name}.py", "--epochs", 4)
    assert float(re.findall(r"test accuracy ([\d.]+)", printed)[-1]) > 0.9
    assert "(100.0 %)" in printed


@pytest.mark.long
def test_accelerate_in_two_processes() -> None:
    printed = torchrun(EXAMPLES / "accelerate_digits.py", "--epochs", 4)
    assert float(re.findall(r"test accuracy ([\d.]+)", printed)[-1]) > 0.9


@pytest.mark.long
def test_seq2seq() -> None:
    printed = run(sys.executable, EXAMPLES / "hf_seq2seq.py", "--steps", 400)
    (right,) = re.findall(r"(\d+) % are read right", printed)
    assert int(right) > 60


@pytest.mark.long
def test_lora() -> None:
    options = ["--steps", 2, "--batch", 1, "--length", 32, "--layers", 4]
    printed = run(sys.executable, EXAMPLES / "lora_smollm2.py", *options)
    assert "100 % of the nodes native" in printed


@pytest.mark.long
def test_data_parallel(tmp_path: Path) -> None:
    options = ["--steps", 4, "--layers", 3, "--width", 128, "--length", 32]
    options += ["--bucket-mb", 0.5, "--trace", tmp_path / "trace.json"]
    printed = torchrun(EXAMPLES / "ddp.py", *options)
    (apart,) = re.findall(r"losses apart by at most ([\d.e+-]+)", printed)
    assert float(apart) < 1e-5
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    backward = [e for e in events if e["name"] == "backward"][-1]
    reductions = [e for e in events if e["name"].startswith("all-reduce")]
    # The first bucket of the last step goes while gradients of earlier layers are still made.
    starts = sorted(e["ts"] for e in reductions if e["ts"] > backward["ts"])
    assert len(starts) > 2
    assert starts[0] < starts[-1] < backward["ts"] + backward["dur"]


@pytest.mark.long
def test_deepspeed() -> None:
    printed = run(sys.executable, EXAMPLES / "deepspeed_zero.py", "--steps", 4)
    shares = re.findall(r"DeepSpeed ZeRO \d .*│ ([\d.]+) +│\n", printed)
    assert len(shares) == 2
    assert max(map(float, shares)) <= 0.55
