# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run all tests with what they run counted: print the coverage, and write the map by which ``make check`` chooses.

Needs the build of ``cmake --preset coverage``, which ``make coverage`` makes. The map is build/test-map.npz.
With ``--left-out`` what ``make test`` leaves out runs too, afterwards, and is counted in figures of its own.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import coverage
import numpy as np
from coverage_map import (
    CoverageMap,
    Function,
    bits,
    functions_of_python,
    innermost,
    read_counters,
    read_notes,
    write_counters,
)
from run_tests import (
    MAP,
    ROOT,
    extension_environment,
    hashes,
    is_test,
    python_name,
    python_tests,
    run,
)

BUILD = ROOT / "build-coverage"
PACKAGE = BUILD / "python" / "ortrain"
# Suites of at least so many tests go through the cases of all operators.
_CASES = 300
# Code that is only there for tests does not count.
_NOT_COUNTED = ("_test.cpp", "_cases.cpp", "_test.h")


def environment(folder: Path) -> dict[str, str]:
    return {**extension_environment(PACKAGE), "ORTRAIN_COVERAGE_DIR": str(folder)}


def is_counted(file: str) -> bool:
    return file.startswith(("ortrain/", "python/")) and not file.endswith(_NOT_COUNTED)


class CppRecord:
    """Counters of all C++ objects, added up over the folders that groups of tests wrote."""

    def __init__(self) -> None:
        self.notes: dict[Path, dict] = {}
        self.sums: dict[Path, tuple[bytes, dict]] = {}

    def _functions(self, counters: Path) -> dict:
        notes = counters.with_suffix(".gcno")
        if notes not in self.notes:
            self.notes[notes] = read_notes(notes, ROOT) if notes.exists() else {}
        return self.notes[notes]

    def add(self, data: Path, place: Path) -> set[Function]:
        """Add one file of counters, of the object that lies at ``place``; return what ran."""
        head, counters = read_counters(data)
        functions = self._functions(place)
        sums = self.sums.setdefault(place, (head, {}))[1]
        ran = set()
        for key, values in counters.items():
            if key in sums:
                sums[key] = sums[key] + values
            else:
                sums[key] = values
            if key in functions and values.any():
                ran.add(functions[key])
        return ran


def cpp_lines(record: CppRecord, folder: Path) -> tuple[int, int, int, int]:
    """Return lines that ran, lines, branches that were taken, branches of the sources that count."""

    def of(place: Path) -> dict:
        into = folder / f"{abs(hash(place))}"
        into.mkdir()
        head, counters = record.sums[place]
        write_counters(into / place.name, head, counters)
        shutil.copy(place.with_suffix(".gcno"), into)
        command = ["gcov", "--json-format", "--branch-probabilities", "--stdout", place.name]
        done = subprocess.run(command, cwd=into, capture_output=True, text=True, check=True)
        shutil.rmtree(into)
        return json.loads(done.stdout)

    lines: dict[tuple[str, int], int] = collections.defaultdict(int)
    branches: dict[tuple[str, int], list[int]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for document in pool.map(of, sorted(record.sums)):
            for file in document["files"]:
                path = Path(document["current_working_directory"], file["file"])
                name = os.path.relpath(path, ROOT)
                if not is_counted(name):
                    continue
                for line in file["lines"]:
                    key = (name, line["line_number"])
                    lines[key] += line["count"]
                    counts = [b["count"] for b in line["branches"] if not b["throw"]]
                    before = branches.setdefault(key, counts)
                    # Instances of a template, and files that include a header, have the same branches.
                    if before is not counts and len(before) == len(counts):
                        branches[key] = [a + b for a, b in zip(before, counts, strict=True)]
                    elif len(counts) > len(before):
                        branches[key] = counts
    taken = [count for counts in branches.values() for count in counts]
    return (
        sum(count > 0 for count in lines.values()),
        len(lines),
        sum(count > 0 for count in taken),
        len(taken),
    )


def python_lines(data: coverage.Coverage, folder: Path) -> tuple[int, int, int, int]:
    report = folder / "python.json"
    data.json_report(outfile=str(report), ignore_errors=True)
    totals = json.loads(report.read_text())["totals"]
    return tuple(
        totals[k] for k in ("covered_lines", "num_statements", "covered_branches", "num_branches")
    )


def python_functions(data: coverage.CoverageData) -> dict[str, set[Function]]:
    """Return which functions each test ran."""
    ran: dict[str, set[Function]] = collections.defaultdict(set)
    for name in data.measured_files():
        path = Path(name)
        if not path.is_relative_to(ROOT) or not path.exists():
            continue
        functions = functions_of_python(str(path.relative_to(ROOT)), path.read_text("utf-8"))
        for line, contexts in data.contexts_by_lineno(name).items():
            function = innermost(functions, line)
            # The line of a definition runs when the module is imported.
            if function is not None and line > function.first:
                for test in contexts:
                    ran[test].add(function)
    ran.pop("", None)
    return ran


def python_seconds(report: Path) -> dict[str, float]:
    """Return how long each test took, by its name for pytest."""
    return {
        python_name(case): float(case.get("time", 0))
        for case in ElementTree.parse(report).iter("testcase")
    }


def cpp_groups() -> list[str]:
    """Return filters that share all C++ tests out: suites, and the cases of each operator."""
    command = [str(BUILD / "ortrain_tests"), "--gtest_list_tests"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    suites: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("  "):
            suites[next(reversed(suites))].append(line.split()[0])
        elif line.split("#")[0].strip().endswith("."):
            suites[line.split()[0]] = []
    groups = set()
    for suite, tests in suites.items():
        operators = {re.match(r"\w+/((?:ortrain__?)?[A-Za-z0-9]+_)", test) for test in tests}
        if len(tests) < _CASES or None in operators:
            groups.add(f"{suite}*")
        else:
            groups |= {f"*/{match[1]}*" for match in operators if match}
    return sorted(groups)


def print_figures(name: str, ran: int, lines: int, taken: int, branches: int) -> None:
    print(
        f"{name}: {ran} of {lines} lines, {100 * ran / max(lines, 1):.2f} %; "
        f"{taken} of {branches} branches, {100 * taken / max(branches, 1):.2f} %",
        flush=True,
    )


class CppRun:
    """Runs groups of C++ tests, each in a process that writes its counters to a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def __call__(self, group: str) -> Path:
        folder = self._folder / f"cpp-{abs(hash(group))}"
        folder.mkdir()
        command = [str(BUILD / "ortrain_tests"), "--gtest_brief=1", f"--gtest_filter={group}"]
        settings = {"GCOV_PREFIX": str(folder), "OMP_WAIT_POLICY": "passive"}
        started = time.monotonic()
        if subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}).returncode != 0:
            self.failed.append(group)
        self.seconds[group] = time.monotonic() - started
        (folder / "tests").write_text(f"{group}\n")
        return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="leave out tests marked slow")
    parser.add_argument(
        "--only",
        choices=["cpp", "python"],
        help="tests of one language; the map keeps those of the other",
    )
    parser.add_argument(
        "--left-out", action="store_true", help="run Python tests that 'make test' leaves out too"
    )
    options = parser.parse_args()
    before = hashes()
    known = CoverageMap.find(MAP) if options.only else None
    if options.only and known is None:
        print("there is no map yet: one of a single language chooses no tests")
    for old in BUILD.rglob("*.gcda"):
        old.unlink()
    shared = Path("/dev/shm")  # a few gigabytes that nobody reads twice
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        folder = Path(name)
        failed = 0
        seconds: dict[str, float] = {}
        record = CppRecord()
        by_test: dict[str, set[Function]] = collections.defaultdict(set)

        def add(place: Path) -> None:
            ran = set()
            for data in place.rglob("*.gcda"):
                ran |= record.add(data, Path("/", data.relative_to(place)))
            for test in (place / "tests").read_text().splitlines():
                by_test[test] |= ran
            shutil.rmtree(place)

        if options.only != "python":
            cpp = CppRun(folder)
            with ThreadPoolExecutor(options.jobs) as pool:
                for place in pool.map(cpp, cpp_groups()):
                    add(place)
            seconds |= cpp.seconds
            failed += len(cpp.failed)
        measured = coverage.Coverage(data_file=str(folder / "python"), config_file=False)

        def run_python(name: str, *more: str) -> int:
            ((report, command),) = python_tests(options.jobs, quick=options.quick).items()
            settings = [f"{k}={v}" for k, v in environment(folder).items()]
            bad = run(name, {report: ["env", *settings, *command, *more]})[1]
            seconds.update(python_seconds(report))
            for place in sorted(folder.glob("*/tests")):
                add(place.parent)
            for data in BUILD.rglob("*.gcda"):  # of processes that tests start
                record.add(data, data)
                data.unlink()
            measured.combine()
            return bad

        def figures(name: str) -> None:
            print_figures(f"{name}, C++", *cpp_lines(record, folder))
            if options.only != "cpp":
                print_figures(f"{name}, Python", *python_lines(measured, folder))

        if options.only != "cpp":
            failed += run_python("Python tests")
        figures("make test")
        if options.left_out and options.only != "cpp":
            failed += run_python("Python tests left out", "--left-out")
            figures("make test-all")
        if options.only != "cpp":
            for test, ran in python_functions(measured.get_data()).items():
                by_test[test] |= ran
        slow = {t for p in folder.glob("slow-*") for t in p.read_text().splitlines()}
        kept, taken, lost = kept_tests(known, options.only)
        slow |= set(known.slow) if known is not None and options.only == "cpp" else set()
        before = {f: v for f, v in before.items() if f not in lost}
        if failed:
            print("tests failed: the map stays as it was")
        else:
            save_map(kept | by_test, taken | seconds, slow, before)
    return int(failed != 0)


def text_of(file: str) -> str | None:
    path = ROOT / file
    return path.read_text("utf-8") if path.exists() else None


def kept_tests(
    known: CoverageMap | None, only: str | None
) -> tuple[dict[str, set[Function]], dict[str, float], set[str]]:
    """Return what a map holds of the language whose tests are not run again.

    Returns:
        The functions of each test, its seconds, and the files whose functions are no longer known.
    """
    if known is None or only is None:
        return {}, {}, set()
    same = np.array([known.texts[f.file] == text_of(f.file) for f in known.functions], bool)
    rows = [i for i, t in enumerate(known.tests) if t.endswith("*") != (only == "cpp")]
    return (
        {
            known.tests[i]: {known.functions[j] for j in np.flatnonzero(known.ran[i] & same)}
            for i in rows
        },
        {known.tests[i]: float(known.seconds[i]) for i in rows},
        {f for f, text in known.texts.items() if text != text_of(f)},
    )


def save_map(
    by_test: dict[str, set[Function]],
    seconds: dict[str, float],
    slow: set[str],
    before: dict[str, str],
) -> None:
    """Write the map; files that are not as ``before`` says are left out."""
    tests = sorted(by_test)
    functions = sorted({f for ran in by_test.values() for f in ran if f.file in before})
    now = hashes()
    texts = {f: text_of(f) or "" for f in {f.file for f in functions} if now[f] == before[f]}
    functions = [f for f in functions if f.file in texts]
    known = set(functions)
    MAP.parent.mkdir(exist_ok=True)
    ran = bits((by_test[t] & known for t in tests), functions)
    taken = [seconds.get(t, 0.0) for t in tests]
    test_files = {f: v for f, v in before.items() if is_test(f)}
    CoverageMap(tests, taken, functions, ran, texts, slow, test_files).save(MAP)
    print(f"{MAP.relative_to(ROOT)}: {len(tests)} tests and groups, {len(functions)} functions")


if __name__ == "__main__":
    sys.exit(main())
