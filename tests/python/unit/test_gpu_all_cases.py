# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators' cases on a GPU, without one: the program that checks them, sanitizers."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_all import op_cases
from benchmarks.gpu_all.line import find_tool
from ortrain import _core
from tests.python.unit.gpu_all_runs import PROVIDER, rehearsed, run

PROGRAM = """#!{python}
import json, sys, time
arguments = sys.argv[2:]
part, parts = map(int, arguments[arguments.index("--part") + 1].split("/"))
after = int(arguments[arguments.index("--after") + 1]) if "--after" in arguments else -1
checked = failed = 0
for case in range(10):
    if case % parts != part or case <= after:
        continue
    print(json.dumps({{"at": case, "case": "Op/" + str(case)}}), flush=True)
    checked += 1
    if case == 3:
        sys.exit("killed by case 3")
    if case == 5:
        print(json.dumps({{"failed": 5, "case": "Op/5", "kernel": "own", "type": "float32",
                          "message": "illegal address"}}), flush=True)
        sys.exit(3)
    if case == 7:
        time.sleep(60)
print(json.dumps({{"cases": checked, "passed": checked, "failed": failed, "refused": 0,
                  "largest": 0.25, "left_out": 0}}))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "program"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("ORTRAIN_CHECK_KERNELS", str(path))
    monkeypatch.setattr(op_cases, "SILENCE", 1.0)
    return path


@pytest.mark.parametrize("processes", [1, 3])
def test_cases_go_on_after_one_that_ends_its_process(program: Path, processes: int) -> None:
    figures = op_cases.check_all(["values"], processes, time.monotonic() + 60).figures()
    assert figures["cases"] == 10 and figures["failed"] == 3 and figures["left out"] == 0
    text = "\n".join(figures["messages"])
    assert "Op/3: the process ended with status 1: killed by case 3" in text
    assert "Op/5 own float32: illegal address" in text
    assert "Op/5: the device takes no more work after it" in text
    assert "Op/7: no answer in 1 s" in text


def test_cases_that_were_left_out_are_told(program: Path) -> None:
    figures = op_cases.check_all(["values"], 1, time.monotonic() - 1).figures()
    assert figures["left out"] > 0


needs_program = pytest.mark.skipif(
    PROVIDER != "simulator", reason="this build has no simulator of the GPU provider"
)


@needs_program
def test_program_checks_cases_of_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORTRAIN_CHECK_KERNELS", raising=False)

    def named(*arguments: str) -> tuple[set[str], dict[str, Any]]:
        done = subprocess.run(
            [op_cases.find_program(), *arguments], capture_output=True, text=True, check=True
        )
        *lines, last = map(json.loads, done.stdout.splitlines())
        return {line["case"] for line in lines if "at" in line}, last

    cases, found = named("values", "--only", "Softmax/rows")
    assert found["cases"] == len(cases) > 0 and found["failed"] == found["left_out"] == 0
    halves = [named("values", "--only", "Softmax/rows", "--part", f"{i}/2")[0] for i in (0, 1)]
    assert halves[0] | halves[1] == cases and not halves[0] & halves[1]
    kernels = _core.device_kernels(PROVIDER)
    others = {"host", "view", "ref"}  # the last of them makes nothing on a device
    own = [case for case in _core.op_cases() if not others.issuperset(kernels[case["op"]])]
    _, found = named("values", "--own", "--seconds", "0")
    assert found["cases"] == 0 and found["left_out"] == len(own) < len(_core.op_cases())
    gradients, found = named("gradients", "--only", "Softmax/rows")
    assert gradients < cases and found["failed"] == 0


@needs_program
@pytest.mark.parametrize(
    "arguments", [[], ["sums"], ["values", "--part", "2/2"], ["values", "--seconds", "x"]]
)
def test_program_refuses(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORTRAIN_CHECK_KERNELS", raising=False)
    command = [op_cases.find_program(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage:" in done.stderr and done.stdout == ""


@needs_program
def test_rehearsal_of_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORTRAIN_CHECK_KERNELS", raising=False)
    figures = rehearsed(tmp_path, "--only", "op-cases")["op-cases"]["figures"]
    assert figures["failed"] == 0 and figures["passed"] > 0
    assert figures["cases"] > 30 and figures["left out"] == 0


def test_program_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_CHECK_KERNELS", "/nowhere/program")
    with pytest.raises(FileNotFoundError, match="/nowhere/program is missing: cmake --build"):
        op_cases.check_all(["values"], 1, time.monotonic() + 5)


def test_sanitizer_is_called_and_read(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\n"
        'test "$1 $2 $3 $4" = "--tool memcheck --print-limit 20" || exit 3\n'
        'echo "========= Invalid __global__ write of size 4 bytes"\n'
        'echo \'{"cases": 1, "passed": 3, "failed": 0, "refused": 0, "left_out": 2}\'\n'
        'echo "========= ERROR SUMMARY: 2 errors"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr(op_cases, "_processes", lambda _: 6)
    assert find_tool("compute-sanitizer") == str(tool)
    measured = run(rehearsal=False)
    figures = op_cases.measure_sanitized(measured, tool="memcheck")
    assert figures["errors"] == 4 and figures["passed"] == 6 and figures["left out"] == 4
    assert "Invalid __global__ write" in figures["reports"][0]
    tool.write_text("#!/bin/sh\necho device not supported; exit 1\n")
    figures = op_cases.measure_sanitized(measured, tool="memcheck")
    assert "no summary" in figures["error"]
    assert figures["processes that did not end well"] == 2
    monkeypatch.setattr(op_cases, "find_tool", lambda name: None)
    with pytest.raises(FileNotFoundError, match="compute-sanitizer was not found"):
        op_cases.measure_sanitized(measured, tool="memcheck")


def test_hazards_of_a_race_are_counted() -> None:
    text = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"
    assert op_cases.sanitized_figures([(text, None)], rehearsal=False)["errors"] == 3
