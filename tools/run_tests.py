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
MAP = BUILD / "test-map.npz"


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
    """Return one command; tests/python/conftest.py says which tests share a worker."""
    report = BUILD / "pytest.xml"
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", str(TESTS)]
    if jobs > 1:
        command = ["env", "OMP_WAIT_POLICY=passive", *command]  # workers share the cores
        command += [f"--numprocesses={jobs}", "--dist=loadgroup", "--no-loadscope-reorder"]
    return {report: [*command, *(["-m", "not slow"] if quick else [])]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="leave out tests marked slow")
    parser.add_argument("--started", type=float, help="when building began, seconds since 1970")
    args = parser.parse_args()

    testing = time.time()
    results = [
        run("C++ tests", cpp_tests(args.jobs)),
        run("Python tests", python_tests(args.jobs, quick=args.quick)),
    ]

    passed, failed, skipped = (sum(column) for column in zip(*results, strict=True))
    if skipped:
        print(f"{skipped} skipped")
    built = f"building {(testing - args.started) / 60:.1f} min, " if args.started else ""
    print(f"{built}testing {(time.time() - testing) / 60:.1f} min")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
