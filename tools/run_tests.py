# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run the C++ tests (GoogleTest) and the Python tests (pytest), then print one line that counts both."""

import argparse
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
TESTS = ROOT / "tests" / "python"
# About as long as all the others together.
_LONG_FOLDERS = frozenset({"distributed", "hf", "models"})


def run(name: str, commands: dict[Path, list[str]]) -> tuple[int, int, int]:
    """Run the commands of one runner at the same time.

    Args:
        name: For the summary line.
        commands: From the JUnit report that a command writes to the command.

    Returns:
        Numbers of (passed, failed, skipped) tests. A command that dies, without a report or with one
        that shows no failure, counts as one failed test.
    """
    print(f"== {name}", flush=True)
    started = time.monotonic()
    for report in commands:
        report.unlink(missing_ok=True)
    processes = [subprocess.Popen(command, cwd=ROOT) for command in commands.values()]
    statuses = [process.wait() for process in processes]
    passed = failed = skipped = 0
    for report, status in zip(commands, statuses, strict=True):
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        bad = sum(c.find("failure") is not None or c.find("error") is not None for c in cases)
        left_out = sum(c.find("skipped") is not None for c in cases)
        if status != 0 and bad == 0:
            print(f"{name}: {' '.join(commands[report])} ended with status {status}")
            failed += 1
        passed += len(cases) - bad - left_out
        failed += bad
        skipped += left_out
    seconds = time.monotonic() - started
    print(f"{name}: {passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s")
    return passed, failed, skipped


def cpp_tests(
    jobs: int, build: Path = BUILD, settings: Sequence[str] = ()
) -> dict[Path, list[str]]:
    """Return one command per shard: thousands of tests are too many for a process each.

    Args:
        jobs: Number of shards.
        build: Where the tests were built.
        settings: More environment variables, ``NAME=value``.
    """
    commands = {}
    for shard in range(jobs):
        report = build / f"gtest-{shard}.xml"
        commands[report] = [
            "env",
            f"GTEST_TOTAL_SHARDS={jobs}",
            f"GTEST_SHARD_INDEX={shard}",
            "OMP_WAIT_POLICY=passive",  # shards share the cores
            *settings,
            str(build / "ortrain_tests"),
            "--gtest_brief=1",
            f"--gtest_output=xml:{report}",
        ]
    return commands


def python_tests(jobs: int, *, quick: bool) -> dict[Path, list[str]]:
    """Return one command, or two where two fit: the folders that wait for processes by themselves."""
    folders = sorted(p for p in TESTS.iterdir() if any(p.glob("test_*.py")))
    groups = [folders]
    if jobs > 1:
        long = [f for f in folders if f.name in _LONG_FOLDERS]
        groups = [[f for f in folders if f not in long], long]
    commands = {}
    for number, group in enumerate(groups):
        report = BUILD / f"pytest-{number}.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *map(str, group)]
        commands[report] = [*command, *(["-m", "not slow"] if quick else [])]
    return commands


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="leave out tests marked slow")
    args = parser.parse_args()

    results = [
        run("C++ tests", cpp_tests(args.jobs)),
        run("Python tests", python_tests(args.jobs, quick=args.quick)),
    ]

    passed, failed, skipped = (sum(column) for column in zip(*results, strict=True))
    if skipped:
        print(f"{skipped} skipped")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
