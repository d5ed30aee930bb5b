# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Pages as a browser sees them: no errors in its console, and the content is there."""

import contextlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.metrics import StepMetrics
from ortrain.profile import profile
from ortrain.tools.findings import findings_of
from ortrain.tools.report import page
from ortrain.tools.report.graph_picture import draw_layers

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CONSOLE = re.compile(r'CONSOLE[:(]\d+\)?\] "(.*)", source:')
# TensorBoard's charts say on their own that they are drawn without a graphics processor.
ERRORS = re.compile(r"Uncaught|Failed to load|ERR_|Refused to|[A-Z]\w*Error\b|\bNG0\d")

SCALARS = ("step_time", "tokens_per_second", "peak_memory_mib", "captures", "escapes")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Return a function that loads an address: its document afterwards, and console lines."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.fail("this test opens pages in Chromium: apt-get install chromium")
    data = tmp_path_factory.mktemp("browser")
    (data / "home").mkdir()

    def load(address, *, milliseconds=10_000, screenshot=None):
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={data}/data"]
        options += ["--enable-logging=stderr", "--v=0", "--window-size=1200,2400"]
        options += [f"--virtual-time-budget={milliseconds}", "--disable-dev-shm-usage"]
        options += [f"--screenshot={screenshot}"] if screenshot else ["--dump-dom"]
        done = subprocess.run(
            [found, *options, address],
            capture_output=True,
            text=True,
            timeout=180,
            env={"HOME": f"{data}/home", "PATH": "/usr/bin:/bin"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, CONSOLE.findall(done.stderr)

    return load


@pytest.fixture(scope="module")
def model():
    layers = [nn.Linear(32, 32), nn.Tanh(), nn.Sigmoid(), nn.LayerNorm(32)]
    made = ORTModule(nn.Sequential(*layers, *layers))
    with profile(made):
        made(torch.randn(16, 32)).square().mean().backward()
    return made


@pytest.fixture(scope="module")
def report(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "r.html"
    path.write_text(page([findings_of(model)], "a report"), encoding="utf-8")
    return path


def test_errors_of_a_page_are_seen(browser, tmp_path):
    planted = tmp_path / "bad.html"
    planted.write_text('<script>nonsense()</script><p>here</p><img src="missing.png">')
    document, console = browser(planted.as_uri())
    assert "here" in document
    assert any("nonsense is not defined" in line and ERRORS.search(line) for line in console)


def test_report_has_no_errors_and_shows_its_pictures(browser, report, model):
    document, console = browser(report.as_uri())
    assert console == []
    buffers = findings_of(model).graphs[0].plan.buffers
    plan = document[document.index('class="plan"') : document.index('class="nodes"')]
    assert plan.count("<rect") == len(buffers) > 10
    nodes = document[document.index('class="nodes"') :]
    drawn = draw_layers(findings_of(model).graphs[0])
    assert nodes.count("<rect") == sum(len(layer.boxes) for layer in drawn) > 10
    for text in ("a report", "Memory over time", "By operator", "By layer", "Fused (", "Captures"):
        assert text in document


def test_hovering_tells_of_a_buffer(browser, report, tmp_path):
    hovered = tmp_path / "hovered.html"
    hover = (
        "<script>document.querySelector('.plan rect').dispatchEvent("
        "new MouseEvent('mousemove', {bubbles: true, clientX: 9, clientY: 9}))</script></body>"
    )
    hovered.write_text(report.read_text(encoding="utf-8").replace("</body>", hover))
    document, console = browser(hovered.as_uri())
    assert console == []
    tip = re.search(r'<div id="tip"[^>]*style="display: block[^>]*>([^<]+)', document)
    assert tip and "at offset" in tip.group(1) and "made by" in tip.group(1)


def test_report_can_be_drawn(browser, report, tmp_path):
    browser(report.as_uri(), screenshot=tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "r.png").stat().st_size > 20_000


@contextlib.contextmanager
def tensorboard(folder):
    """Run TensorBoard on a port that is free; gives its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
        + ["--host", "127.0.0.1", "--port", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            address = re.search(r"http://127\.0\.0\.1:\d+/", line)
            if address:
                break
        else:
            pytest.fail(f"TensorBoard did not start: {''.join(said)}")
        yield address.group(0)
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.mark.slow
def test_tensorboard_shows_the_scalars(browser, model, tmp_path):
    with StepMetrics(model, log_dir=tmp_path, show=False) as metrics:
        for _ in range(3):
            model(torch.randn(16, 32)).square().mean().backward()
            metrics.step(tokens=16)
    with tensorboard(tmp_path) as address:
        document, console = browser(f"{address}#timeseries", milliseconds=30_000)
    assert [line for line in console if ERRORS.search(line)] == []
    assert [name for name in SCALARS if f"ortrain/{name}" not in document] == []
