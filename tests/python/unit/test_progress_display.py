# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
import io
import os
import pty
import subprocess
import sys

import pytest
from rich.console import Console

from ortrain import progress, progress_display

SCRIPT = """
import torch
from ortrain import ORTModule
from ortrain.metrics import StepMetrics
model = ORTModule(torch.nn.Linear(4, 4))
with StepMetrics(model, total_steps=3) as metrics:
    for rows in (2, 3, 4):
        model(torch.ones(rows, 4)).sum().backward()
        metrics.step(tokens=rows)
model.eval()
with torch.no_grad():
    model(torch.ones(2, 4))
"""


def on_a_terminal(code: str, **variables: str) -> str:
    """Run a program whose stderr is a terminal; returns what it wrote there."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", **variables}
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL, stderr=theirs
        )
    finally:
        os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # Linux's way to say that nobody holds the other end
        pass
    finally:
        os.close(ours)
    assert process.wait() == 0
    return written.decode()


@pytest.fixture
def console():
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def test_long_stages_leave_a_line(console, monkeypatch):
    monkeypatch.setattr(progress_display, "_SHORTEST", 0.0)
    with progress.listen(progress_display.StageDisplay(console)):
        with progress.stage("capture"), progress.stage("export"):
            pass
    monkeypatch.setattr(progress_display, "_SHORTEST", 60.0)
    with progress.listen(progress_display.StageDisplay(console)), progress.stage("plan"):
        pass
    text = console.file.getvalue()
    assert "Ortrain: capture  0.00 s" in text
    assert "export" not in text  # a part of capture
    assert "Ortrain: plan  " not in text


def test_reasons_and_failures_are_shown(console):
    with (
        progress.listen(progress_display.StageDisplay(console)),
        pytest.raises(ValueError),
        progress.stage("convert"),
    ):
        progress.note("capturing again: sizes: n == 1")
        raise ValueError
    text = console.file.getvalue()
    assert "capturing again: sizes: n == 1" in text
    assert "convert failed after" in text


def test_the_bar_shows_figures(console):
    with progress_display.TrainingDisplay(7, console) as display:
        display.show("0.125 s, 80 tokens/s")
        with progress.listen(progress_display.StageDisplay()), progress.stage("plan"):
            progress.note("capturing again: sizes")  # goes above the bar
    text = console.file.getvalue()
    assert "1/7" in text and "0.125 s, 80 tokens/s" in text
    assert "capturing again" in text


@pytest.mark.parametrize(
    "variables",
    [{"ORTRAIN_PROGRESS": "off"}, {"WORLD_SIZE": "2", "RANK": "1"}],
    ids=["off", "second rank"],
)
def test_nothing_is_shown_where_it_is_not_wanted(variables):
    assert on_a_terminal(SCRIPT, **variables) == ""


def test_a_terminal_sees_stages_and_steps():
    text = on_a_terminal(SCRIPT, ORTRAIN_PROGRESS="auto")
    assert "Ortrain: capture" in text
    assert "3/3" in text and "tokens/s" in text and "MiB" in text
    assert "capturing again" in text


def test_no_terminal_no_words():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
