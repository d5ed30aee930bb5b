# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Threads that log, plan and ask at once do not wait for each other forever."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ortrain import _core

# Planning holds the session and logs lines in Python; the getters ask the session.
PROGRAM = """
import logging, sys, threading
import torch
from torch import nn
from ortrain import ORTModule

logging.getLogger("ortrain").addHandler(logging.NullHandler())
logging.getLogger("ortrain").setLevel(logging.DEBUG)
sys.setswitchinterval(1e-5)
model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)))
model(torch.randn(1, 4)).sum().backward()
(program,) = [p for _, p in model._ortrain_engine.made_programs()]
session = program.session
done = threading.Event()
asked = 0

def ask():
    global asked
    while not done.is_set():
        session.num_plans, session.latest_plan(), session.recordings, session.profile()
        asked += 1

reader = threading.Thread(target=ask)
reader.start()
for rows in range(2, 60):
    for _ in range(3):
        model(torch.randn(rows, 4)).sum().backward()
done.set()
reader.join()
assert asked > 0 and session.num_plans > 10
print("done")
"""


@pytest.mark.parametrize("simulated", ["0", "1"])
def test_a_log_line_while_planning_does_not_wait_for_who_asks(simulated: str) -> None:
    if simulated == "1" and _core.gpu_platform() != "simulator":
        pytest.skip("this build has no simulator of the GPU provider")
    environment = {
        **os.environ,
        "ORTRAIN_LOG": "plan,dispatch",
        "ORTRAIN_GPU_SIMULATOR": simulated,
    }
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip().endswith("done")
    assert "steps (" in result.stderr, "nothing was logged"
