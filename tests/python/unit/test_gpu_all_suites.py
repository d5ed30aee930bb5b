# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Conformance suites and programs of users as lines for a machine with a GPU, without one."""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu_all import conformance_suites, doors
from benchmarks.gpu_all.line import result_of
from benchmarks.gpu_all.programs import PROGRAMS, Wrap, alone
from benchmarks.gpu_all.programs.training import Net
from benchmarks.worker import TIME_LIMIT
from ortrain import ORTModule
from tests.python.unit.gpu_all_runs import run


@pytest.mark.parametrize("suite", ["operators", "silent", "stateful", "programs"])
def test_commands_of_a_suite_are_parts_of_it(suite: str, tmp_path: Path) -> None:
    commands = conformance_suites._commands(run(rehearsal=False), suite, tmp_path)
    assert len(commands) == conformance_suites.PROCESSES.get(suite, 3)
    assert len({tuple(command) for command in commands}) == len(commands)
    assert all("--device" in command and "--seconds" in command for command in commands)


def test_figures_count_what_differs_or_raises() -> None:
    found = conformance_suites.figures(
        "operators",
        [["a", "native", 3, ""], ["b", "wrong", 3, "other"], ["c", "failed", 1, "raised"]],
    )
    assert (found["wrong"], found["compared"]) == (2, 3)
    assert found["differences"] == ["b: wrong: other", "c: failed: raised"]
    found = conformance_suites.figures("stateful", [[0, ""], [1, "call 2: state"]])
    assert (found["wrong"], found["compared"]) == (1, 2)
    models = [
        {"name": "A", "difference": "", "fallback": ""},
        {"name": "B", "difference": "off", "fallback": ""},
        {"name": "C", "difference": "", "fallback": "why"},
    ]
    found = conformance_suites.figures("architectures", models)
    assert (found["wrong"], found["one graph"], found["no graph"]) == (1, 1, ["C: why"])


def test_what_was_cut_off_is_not_called_right_or_wrong() -> None:
    nothing = conformance_suites.figures("stateful", [])
    assert nothing == {"compared": 0}
    line = next(line for line in conformance_suites.LINES if line.key == "suite-stateful")
    assert result_of(line, nothing, 1.0, rehearsal=False)["status"] == "incomplete"
    made = {
        "a": {"right": True},
        "b": {"right": False, "error": f"b: {TIME_LIMIT}"},
        "c": {"right": False, "error": "raised"},
    }
    found = doors.figures(made)
    assert (found["wrong"], found["compared"]) == (1, 2)
    assert found["unfinished"] == "cut off by the time: b"
    found = doors.figures({name: made[name] for name in "ab"})
    assert result_of(doors.LINES[0], found, 1.0, rehearsal=False)["status"] == "incomplete"


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["operators", "stateful"])
def test_a_suite_is_rehearsed(suite: str) -> None:
    found = conformance_suites.measure_suite(run(), suite=suite)
    assert found["wrong"] == 0 and found["compared"] > 0 and "ended badly" not in found


def test_what_differs_is_told() -> None:
    ones = torch.ones(3)
    assert doors.difference(ones, ones.clone()) == ""
    assert "apart" in doors.difference(ones * 1.01, ones)
    assert doors.difference(ones.half() * 1.001, ones.half()) == ""
    assert "expected" in doors.difference(ones.double(), ones)
    assert "finite" in doors.difference(ones / 0, ones)
    assert doors.difference(float("nan"), 1.0) and doors.difference(1, 2)
    assert doors.difference(torch.tensor([1]), torch.tensor([2])) == "other values"


@pytest.mark.parametrize(
    "name", ["accumulation", "dropped", "moved_about", "odd_views", "evaluated"]
)
def test_programs_see_the_same_here(name: str) -> None:
    made = doors.check(name, "cpu")
    assert made["right"], made


def test_programs_that_want_the_memory_run_by_themselves() -> None:
    assert alone() == {n for n in PROGRAMS if n.endswith("beyond_31_bits")}


def test_a_way_keeps_what_it_made() -> None:
    plain = Net()
    assert Wrap()(plain) is plain and not Wrap().ours
    ours = Wrap(ORTModule)
    made = ours(plain)
    assert ours.ours and ours.made == [made] and made.module is plain
