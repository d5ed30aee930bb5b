# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Costly tests take turns: none is left out for long, and what is dear runs more rarely."""

import ast
from pathlib import Path

import pytest

from tests.python.drawn_tests import LEAST_SHARE, Costs, share_of

ROOT = Path(__file__).resolve().parents[3]
COSTS = Costs({"a.py::dear": 0.8, "a.py::dearest": 60.0})
DRAWS = [f"{i:08x}" for i in range(400)]


def shares(case: str) -> float:
    return sum(bool(COSTS.drawn([case], draw)) for draw in DRAWS) / len(DRAWS)


def test_a_test_runs_as_often_as_it_is_cheap():
    assert shares("a.py::cheap") == shares("a.py::cheap[x]") == 1
    assert shares("a.py::dear[x]") == pytest.approx(0.25, abs=0.07)
    assert shares("a.py::dearest") == pytest.approx(LEAST_SHARE, abs=0.05)


def test_a_draw_is_its_name():
    cases = [f"a.py::dear[{i}]" for i in range(100)]
    drawn = [COSTS.drawn(cases, draw) for draw in ("one", "one", "two")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert 0 < len(drawn[0]) < 50


def test_each_case_has_its_turn():
    cases = {f"a.py::dearest[{i}]" for i in range(20)}
    assert set().union(*(COSTS.drawn(cases, draw) for draw in DRAWS[:100])) == cases


def test_tests_that_nobody_has_timed_are_counted():
    times = {
        "a.py::dear[0]": 3.0,
        "b.py::cheap": 0.1,
        "b.py::costly[0]": 2.0,
        "b.py::costly[1]": 4.0,
    }
    assert COSTS.untimed(times) == (1, 6.0)
    assert COSTS.untimed({"b.py::cheap": 0.1}) == (0, 0)


def test_what_is_kept_of_a_report(tmp_path):
    report = tmp_path / "pytest.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.python.unit.test_a" name="test_b[0]" time="1"/>
        <testcase classname="tests.python.unit.test_a" name="test_b[1]" time="2"/>
        <testcase classname="tests.python.unit.test_a" name="test_b[2]" time="0"><skipped/></testcase>
        <testcase classname="tests.python.unit.test_a" name="test_cheap" time="0.1"/>
        <testcase classname="tests.python.hf.test_c" name="test_d" time="4"/>
        </testsuite></testsuites>"""
    )
    before = {
        "tests/python/unit/test_a.py::test_cheap": 2.0,
        "tests/python/unit/test_a.py::test_b": 9.0,
        "tests/python/hf/test_c.py::test_e": 3.0,
    }
    Costs(before).renewed(report).save(tmp_path / "costs.json")
    costs = Costs.load(tmp_path / "costs.json").seconds
    expected = {"tests/python/hf/test_c.py::test_d": 4.0, "tests/python/hf/test_c.py::test_e": 3.0}
    assert costs == {**expected, "tests/python/unit/test_a.py::test_b": 1.5}
    assert all(share_of(seconds) < 1 for seconds in costs.values())


def test_costs_are_of_tests_that_are_there():
    """A test by another name, or in another file, runs always until somebody has timed it."""
    gone = []
    names: dict[str, set[str]] = {}
    for test in Costs.load().seconds:
        file, _, name = test.partition("::")
        if file not in names:
            tree = ast.parse((ROOT / file).read_text()) if (ROOT / file).exists() else None
            names[file] = (
                {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} if tree else set()
            )
        if name not in names[file]:
            gone.append(test)
    assert not gone, f"leave these out of test_costs.json: {gone}"
