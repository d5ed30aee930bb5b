# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which of the costly tests 'make test' runs: of each as many cases as to cost 0.2 s a run, in the mean of all runs.

A draw is named by a text, of 'make test' the commit: the same commit runs the same tests, the next one others, so that
none is left out for long. A test that nobody has timed runs always.

    python -m tests.python.drawn_tests build/pytest.xml     keep what a run has timed
"""

from __future__ import annotations

import collections
import hashlib
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from pathlib import Path

FILE = Path(__file__).with_name("test_costs.json")
# Seconds of a test in a run, in the mean; and its share of runs, whatever it costs.
MEAN_SECONDS = 0.2
LEAST_SHARE = 1 / 8


def share_of(seconds: float) -> float:
    """Return the share of runs that take part in a case of so many seconds."""
    return max(LEAST_SHARE, min(1.0, MEAN_SECONDS / seconds)) if seconds > 0 else 1.0


class Costs:
    """Seconds of one case of each costly test, by the name that pytest gives it.

    Attributes:
        seconds: From "tests/python/unit/test_a.py::test_b" to the mean of its cases.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    @staticmethod
    def load(file: Path = FILE) -> Costs:
        files: dict[str, dict[str, float]] = json.loads(file.read_text())
        return Costs({f"{f}::{name}": s for f, tests in files.items() for name, s in tests.items()})

    def renewed(self, report: Path) -> Costs:
        """Return these with what a JUnit report says of the tests that it holds; cheap ones are not kept."""
        times = collections.defaultdict(list)
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.get("classname", "").replace(".", "/")
            if case.find("skipped") is None:
                name = case.get("name", "").partition("[")[0]
                times[f"{file}.py::{name}"].append(float(case.get("time", 0)))
        means = {test: round(sum(each) / len(each), 2) for test, each in times.items()}
        return Costs({test: s for test, s in (self.seconds | means).items() if share_of(s) < 1})

    def untimed(self, times: Mapping[str, float]) -> tuple[int, float]:
        """Return how many tests would be drawn if they were kept here, and how long their cases take.

        Args:
            times: Seconds of cases by the names that pytest gives them.
        """
        tests = collections.defaultdict(list)
        for case, seconds in times.items():
            test = case.partition("[")[0].partition("@")[0]  # xdist's group follows an @
            if test not in self.seconds:
                tests[test].append(seconds)
        costly = [each for each in tests.values() if share_of(sum(each) / len(each)) < 1]
        return len(costly), sum(map(sum, costly))

    def save(self, file: Path = FILE) -> None:
        """Write a line for each file of tests."""
        files = collections.defaultdict(dict)
        for test, seconds in sorted(self.seconds.items()):
            path, _, name = test.partition("::")
            files[path][name] = seconds
        lines = (f"{json.dumps(path)}: {json.dumps(tests)}" for path, tests in files.items())
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    def drawn(self, cases: Iterable[str], draw: str) -> set[str]:
        """Return the cases that run in a draw.

        Args:
            cases: Names as pytest gives them: "tests/python/unit/test_a.py::test_b[0-float32]".
            draw: Names the draw; equal names draw equal cases.
        """
        return {
            case
            for case in cases
            if _place(draw + case) < share_of(self.seconds.get(case.partition("[")[0], 0.0))
        }


def _place(text: str) -> float:
    """Return a number in [0, 1) that is any text's own."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def main() -> int:
    Costs.load().renewed(Path(sys.argv[1])).save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
