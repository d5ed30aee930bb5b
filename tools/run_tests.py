# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run the C++ tests (GoogleTest) and the Python tests (pytest), then print one line that counts both."""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from check_sizes import tracked_files
from coverage_map import CoverageMap

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
TESTS = ROOT / "tests" / "python"
MAP = BUILD / "test-map.npz"
# Hashes of all files when tests last passed.
CHECKED = BUILD / "checked.json"
# How long tests chosen by what changed take, one after another.
_SECONDS = 60.0
# Files that no test but those in tests/python/null reads.
_TEXTS = (".md", ".txt", "LICENSE", "NOTICE", ".gitignore", ".clang-format")


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


def python_tests(
    jobs: int, *, quick: bool = False, everything: bool = False, tests: str = str(TESTS)
) -> dict[Path, list[str]]:
    """Return one command; tests/python/conftest.py says which tests share a worker."""
    report = BUILD / "pytest.xml"
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", tests]
    if jobs > 1:
        command = ["env", "OMP_WAIT_POLICY=passive", *command]  # workers share the cores
        command += [f"--numprocesses={jobs}", "--dist=loadgroup", "--no-loadscope-reorder"]
    command += ["-m", "not slow"] if quick else []
    return {report: [*command, *(["--everything"] if everything else [])]}


def hashes() -> dict[str, str]:
    """Return a hash of each file that belongs to the project."""
    return {
        str(file): hashlib.sha256((ROOT / file).read_bytes()).hexdigest()
        for file in tracked_files(ROOT)
    }


def changed_files(now: dict[str, str]) -> dict[str, str | None] | None:
    """Return the text of each file that changed since tests last passed, None for one that is gone.

    Returns:
        None where tests have not passed here, or a file is no text.
    """
    if not CHECKED.exists():
        return None
    before = json.loads(CHECKED.read_text())
    changed: dict[str, str | None] = dict.fromkeys(before.keys() - now.keys())
    for file, value in now.items():
        if before.get(file) != value:
            try:
                changed[file] = (ROOT / file).read_text("utf-8")
            except UnicodeDecodeError:
                return None
    return changed


def tests_for(changed: dict[str, str | None]) -> list[str] | None:
    """Return tests for what changed, filters of GoogleTest and names for pytest; None: nobody can tell."""
    chosen = [str((TESTS / "null").relative_to(ROOT))]
    sources = {}
    for file, text in changed.items():
        name = Path(file).name
        if name.startswith("test_") and name.endswith(".py"):
            chosen += [file] if text is not None else []
        elif name.endswith("_test.cpp"):
            suites = set(re.findall(r"^\s*(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+)", text or "", re.M))
            chosen += [
                f"{start}{s}{end}.*"
                for s in sorted(suites)
                for start in ("", "*/")
                for end in ("", "/*")
            ]
        elif not name.endswith(_TEXTS):
            sources[file] = text
    if sources:
        choice = CoverageMap.load(MAP).choose(sources, _SECONDS) if MAP.exists() else None
        if choice is None:
            return None
        print(
            f"{', '.join(sources)}: {len(choice.tests)} tests or groups, {choice.left_out} left to 'make test'"
        )
        chosen += choice.tests
    return chosen


def commands_for(tests: list[str], jobs: int) -> list[tuple[str, dict[Path, list[str]]]]:
    """Return the commands of both runners for some tests, slow ones left out."""
    filters = [t for t in tests if t.endswith("*")]
    names = [t for t in tests if not t.endswith("*")]
    commands = []
    if filters:
        flags = BUILD / "chosen.flags"
        flags.write_text(f"--gtest_filter={':'.join(filters)}\n")
        cpp = cpp_tests(jobs)
        commands.append(
            ("C++ tests", {r: [*c, f"--gtest_flagfile={flags}"] for r, c in cpp.items()})
        )
    chosen = BUILD / "chosen.txt"
    chosen.write_text("\n".join(names) + "\n")
    python = python_tests(jobs, quick=True, tests=f"@{chosen}")
    return [*commands, ("Python tests", python)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--everything", action="store_true", help="long tests and all cases too")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tests for what changed; all that are not slow where nobody can tell",
    )
    parser.add_argument("--started", type=float, help="when building began, seconds since 1970")
    args = parser.parse_args()

    testing = time.time()
    now = hashes()
    changed = changed_files(now) if args.quick else None
    chosen = tests_for(changed) if changed is not None else None
    if chosen is not None:
        commands = commands_for(chosen, args.jobs)
    else:
        python = python_tests(args.jobs, quick=args.quick, everything=args.everything)
        commands = [("C++ tests", cpp_tests(args.jobs)), ("Python tests", python)]
    results = [run(*each) for each in commands]

    passed, failed, skipped = (sum(column) for column in zip(*results, strict=True))
    if skipped:
        print(f"{skipped} skipped")
    built = f"building {(testing - args.started) / 60:.1f} min, " if args.started else ""
    print(f"{built}testing {(time.time() - testing) / 60:.1f} min")
    print(f"{passed} passed, {failed} failed")
    if failed or passed == 0:
        return 1
    CHECKED.write_text(json.dumps(now))
    return 0


if __name__ == "__main__":
    sys.exit(main())
