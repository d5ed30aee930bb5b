# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What GCC counts is read rightly, and tests are chosen by what changed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import coverage_map  # noqa: E402
from coverage_map import CoverageMap, Function  # noqa: E402

PROGRAM = """
int ran(int x) {
  return x > 1 ? 2 : 1;
}
int did_not(int x) { return x; }
int main(int argc, char**) { return argc > 5 ? did_not(1) : ran(argc) - 1; }
"""


def test_counters_of_gcc(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text(PROGRAM)
    command = ["c++", "--coverage", "-O0", str(tmp_path / "a.cpp"), "-o", "a"]
    subprocess.run(command, cwd=tmp_path, check=True)
    subprocess.run(["./a"], cwd=tmp_path, check=True)
    (notes,) = tmp_path.glob("*.gcno")
    functions = coverage_map.read_notes(notes, tmp_path)
    assert {(f.file, f.first, f.last) for f in functions.values()} == {
        ("a.cpp", 2, 4),
        ("a.cpp", 5, 5),
        ("a.cpp", 6, 6),
    }
    data = notes.with_suffix(".gcda")
    head, counters = coverage_map.read_counters(data)
    assert sorted(functions[k].first for k, v in counters.items() if v.any()) == [2, 6]
    # What is written again means the same to gcov.
    printed = []
    for _ in range(2):
        command = ["gcov", "--stdout", "--branch-counts", data.name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        printed.append(done.stdout)
        coverage_map.write_counters(data, head, counters)
    assert printed[0] == printed[1] and "#####:    5" in printed[0]


def make_map() -> CoverageMap:
    text = "import os\n\n\ndef f():\n    return 1\n\n\ndef g():\n    return 2\n"
    functions = [Function("a.py", 4, 5), Function("a.py", 8, 9), Function("b.py", 1, 2)]
    ran = np.array([[1, 0, 0], [1, 0, 1], [0, 1, 1], [0, 0, 1]], bool)
    texts = {"a.py": text, "b.py": "def h():\n    pass\n"}
    return CoverageMap(
        ["f", "f and h", "g and h", "h"], [1.0, 5.0, 5.0, 1.0], functions, ran, texts
    )


@pytest.mark.parametrize(
    ("old", "new", "seconds", "tests"),
    [
        ("return 1", "return 3", 10, ["f", "f and h"]),
        ("return 1", "return 3", 2, ["f"]),
        ("return 2", "return 3", 0, ["g and h"]),  # at least one
        ("import os", "import re", 0, []),  # its users change, too
        ("return 2\n", "return 2\n\n\ndef k():\n    pass\n", 0, ["g and h"]),
    ],
)
def test_tests_of_the_functions_that_changed(
    tmp_path: Path, old: str, new: str, seconds: float, tests: list[str]
) -> None:
    make_map().save(tmp_path / "map.npz")
    known = CoverageMap.load(tmp_path / "map.npz")
    choice = known.choose({"a.py": [known.texts["a.py"].replace(old, new)]}, seconds)
    assert choice is not None and sorted(choice.tests) == tests


def changed(known: CoverageMap, old: str, new: str) -> dict[str, list[str | None]]:
    return {"a.py": [known.texts["a.py"].replace(old, new)]}


def test_unknown_files_and_code_without_tests_are_said() -> None:
    known = make_map()
    assert known.choose({"c.py": ["x = 1\n"]}, 9) is None
    assert known.choose(changed(known, "import os", "LIMIT = 3"), 9) is None  # others may read it
    assert known.choose(changed(known, "return 1", "return )"), 9) is None
    known.slow = frozenset({"g and h"})
    assert known.choose(changed(known, "return 2", "return 3"), 9) is None
    known.slow = frozenset()
    known.ran[:, 1] = False
    assert known.choose(changed(known, "return 2", "return 3"), 9) is None


def test_texts_of_both_times_count() -> None:
    """Back as the map has it, and something else changed: tests that passed in between are run again."""
    known = make_map()
    now = known.texts["a.py"].replace("return 2", "return 3")
    then = known.texts["a.py"].replace("return 1", "return 5")
    choice = known.choose({"a.py": [now, then]}, 100)
    assert choice is not None and {"f", "g and h"} <= set(choice.tests)


def test_headers_mean_something_to_those_who_include_them() -> None:
    text = "constexpr int kSize = 3;\nint f() {\n  return kSize;\n}\n"
    for name, told in (("a.h", False), ("a.cpp", True), ("a_cases.cpp", False)):
        known = CoverageMap(
            ["t"], [1.0], [Function(name, 2, 4)], np.ones((1, 1), bool), {name: text}
        )
        choice = known.choose({name: [text.replace("3", "4")]}, 9)
        assert (choice is not None) == told
        assert known.choose({name: [text.replace("return ", "return -")]}, 9).tests == ["t"]


def test_a_map_of_another_version_is_none(tmp_path: Path) -> None:
    path = tmp_path / "map.npz"
    assert CoverageMap.find(path) is None
    np.savez(path, tests=np.array("[]"))
    assert CoverageMap.find(path) is None
    path.write_bytes(b"PK\3\4 damaged")
    assert CoverageMap.find(path) is None
    make_map().save(path)
    found = CoverageMap.find(path)
    assert found is not None and found.tests == make_map().tests
