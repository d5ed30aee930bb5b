# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The command ``ortrain``: env, explain, report, bench. See test_artifacts.py for artifacts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ortrain.tools.bench import BenchError, BenchResult, compare
from ortrain.tools.command import app
from ortrain.tools.script import run_script

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

TRAINING = """
import argparse
import torch
from ortrain import ORTModule

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--fail-at", type=int, default=-1)
options = parser.parse_args()

def main():
    model = ORTModule(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()))
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(options.steps):
        if number == options.fail_at:
            raise RuntimeError(f"broken at {number}")
        model(torch.ones(4, 8)).sum().backward()
        first.step()
        second.step()
        first.zero_grad()
    print("native:", model.report().native_nodes > 0)

main()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_env_as_text_and_json():
    told = run("env")
    assert told.exit_code == 0 and "ORTRAIN_LOG" in told.output
    info = json.loads(run("env", "--json").output)
    assert set(info) == {"versions", "core", "machine", "torch", "flags"}


def test_env_needs_no_engine():
    code = (
        "import sys; sys.modules['ortrain._core'] = None; sys.argv = ['ortrain', 'env']\n"
        "from ortrain.tools.command import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "not available" in done.stdout, done.stderr


def test_explain_runs_the_script_and_tells(script):
    told = run("explain", script, "--steps", 2)
    assert told.exit_code == 0, told.output
    assert "native: True" in told.output
    assert "capture 1, training: first call" in told.output
    assert "memory by plan" in told.output


def test_report_writes_one_page(script, tmp_path):
    page = tmp_path / "r.html"
    told = run("report", script, "-o", page, "--steps", 2)
    assert told.exit_code == 0, told.output
    assert f"wrote {page}" in told.output.replace("\n", "")
    text = page.read_text()
    assert "train.py: what Ortrain did" in text and "Memory over time" in text
    assert "By operator" in text


def test_options_of_the_same_name_go_behind_dashes(script, tmp_path):
    told = run("explain", script, "--", "--steps", 1)
    assert told.exit_code == 0 and "first call" in told.output


def test_scripts_without_ortmodule_are_told_so(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("print('hello')")
    for command in ("explain", "report"):
        told = run(command, script)
        assert told.exit_code == 1
        assert "made no ORTModule" in told.output
        assert "ORTTrainer are not shown" in told.output


def test_a_script_that_fails_is_told_of(script, tmp_path):
    page = tmp_path / "r.html"
    told = run("report", script, "-o", page, "--fail-at", 2)
    assert told.exit_code == 1
    assert "RuntimeError: broken at 2" in told.output and f"wrote {page}" in told.output
    assert "first call" in page.read_text()
    told = run("explain", script, "--fail-at", 2)
    assert told.exit_code == 1
    assert "RuntimeError: broken at 2" in told.output and "first call" in told.output
    told = run("report", script, "-o", tmp_path / "none.html", "--steps", "many")
    assert told.exit_code == 2 and not (tmp_path / "none.html").exists()


def test_of_several_processes_the_first_one_tells(script, tmp_path, monkeypatch):
    page = tmp_path / "r.html"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for command in (("explain",), ("report", "-o", page)):
        told = run(*command, script, "--steps", 1)
        assert told.exit_code == 0, told.output
        assert "first call" not in told.output and "wrote" not in told.output
        assert run(*command, script, "--fail-at", 0).exit_code == 1
    assert not page.exists()
    monkeypatch.setenv("RANK", "0")
    assert run("report", "-o", page, script, "--steps", 1).exit_code == 0
    assert "train.py, process 0: what Ortrain did" in page.read_text()


def test_status_of_the_script_is_kept(tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text("import sys\nfrom ortrain import ORTModule\nimport torch\n")
    script.write_text(script.read_text() + "ORTModule(torch.nn.Linear(1, 1))\nsys.exit(3)\n")
    assert run("explain", script).exit_code == 3


def test_an_interrupted_script_is_told_of(tmp_path):
    script = tmp_path / "long.py"
    script.write_text(
        "import torch\nfrom ortrain import ORTModule\n"
        "ORTModule(torch.nn.Linear(2, 2))(torch.ones(1, 2))\nraise KeyboardInterrupt\n"
    )
    told = run("report", script, "-o", tmp_path / "r.html")
    assert told.exit_code == 130 and "interrupted" in told.output
    assert "first call" in (tmp_path / "r.html").read_text()


def test_missing_files_and_folders_are_refused(script, tmp_path):
    assert run("explain", tmp_path / "no.py").exit_code == 2
    told = run("report", script, "-o", tmp_path / "no" / "r.html")
    assert told.exit_code == 2 and "there is no folder" in told.output


def test_run_script_leaves_the_process_as_it_was(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['a', '-b']\nsys.exit('sorry')\n")
    before = list(sys.argv), list(sys.path)
    assert run_script(script, ["a", "-b"]) == 1
    assert (sys.argv, sys.path) == before
    script.write_text("raise ValueError('mine')")
    with pytest.raises(ValueError, match="mine"):
        run_script(script)
    assert (sys.argv, sys.path) == before


@pytest.mark.slow
def test_bench_times_both_sides(script, tmp_path):
    written = tmp_path / "b.json"
    told = run("bench", script, "--timed", 3, "--warmup", 2, "--json", written, "--steps", 50)
    assert told.exit_code == 0, told.output
    assert "PyTorch" in told.output and "times as fast" in told.output
    times = json.loads(written.read_text())
    assert len(times["ortrain"]) == len(times["pytorch"]) == 3
    assert min(times["ortrain"] + times["pytorch"]) > 0
    # The capture is in the first step, which the script's whole beginning belongs to.
    assert times["first_ortrain"] > max(times["ortrain"])


@pytest.mark.long
@pytest.mark.slow
def test_bench_counts_the_steps_of_the_first_optimizer(tmp_path):
    script = tmp_path / "tells.py"
    script.write_text(
        TRAINING.replace(
            "first.zero_grad()",
            f"open({str(tmp_path)!r} + f'/{{bool(model.report().captures)}}', 'w').close()",
        )
    )
    result = compare(script, ["--steps", "6"], timed=50, warmup=2)
    assert len(result.ortrain) == len(result.pytorch) == 4
    # One side runs in PyTorch.
    assert (tmp_path / "True").exists() and (tmp_path / "False").exists()


@pytest.mark.long
@pytest.mark.slow
def test_bench_shows_what_a_failing_script_said(script):
    with pytest.raises(BenchError, match="(?s)it fails as .*RuntimeError: broken at 3"):
        compare(script, ["--fail-at", "3"])
    told = run("bench", script, "--", "--fail-at", 0)
    assert told.exit_code == 1 and "broken at 0" in told.output


@pytest.mark.long
@pytest.mark.slow
def test_bench_refuses_scripts_with_few_steps(script, tmp_path):
    with pytest.raises(BenchError, match="it made 3 steps, of which the first 3 do not count"):
        compare(script, ["--steps", "3"])
    idle = tmp_path / "idle.py"
    idle.write_text("import torch")
    with pytest.raises(BenchError, match="no step of a torch.optim.Optimizer was seen"):
        compare(idle)


def test_bench_result_of_known_times():
    result = BenchResult([1.0, 2.0, 3.0], [4.0, 4.0, 5.0], 9.0, 8.0)
    assert result.ratio == 0.5
    assert "0.500 of PyTorch's time for a step (2.00 times as fast); 3 steps each" in str(result)
    assert result.as_dict()["ratio"] == 0.5


@pytest.mark.long
@pytest.mark.slow
def test_report_of_gpt2_is_small(tmp_path):
    page = tmp_path / "r.html"
    told = run("report", EXAMPLES / "gpt2_step.py", "-o", page, "--steps", 1, "--length", 32)
    assert told.exit_code == 0, told.output
    assert 50_000 < page.stat().st_size < 1_000_000
    assert "transformer.h.1 to transformer.h." in page.read_text()
